"""What is refused in SGLang, by name, and what the plugin adds there."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.adapters.engine_version import UntestedEngine
from attn_backends.adapters.sglang import plugin
from attn_backends.adapters.sglang.backend import SGLangAttention, most_tokens
from attn_backends.adapters.sglang.layers import reject_layer
from attn_backends.interface.capabilities import Unsupported
from attn_backends.registry import AUTO, backends
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)
from tests.helpers.sglang_engine import Engine, GraphRunner, Kind, Shape

FULL = Shape(kinds=(Kind(),))


def made(change: Any) -> SGLangAttention:
    """A backend over a runner that something was done to."""
    engine = Engine("TORCH", FULL)
    change(engine)
    return SGLangAttention("TORCH", engine.runner)


def put(owner: str, name: str, value: Any) -> Any:
    return lambda engine: setattr(eval(f"engine.{owner}", {"engine": engine}), name, value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("runner", "use_mla_backend", True), "mla: got a model with latent attention"),
        (put("runner.server_args", "dcp_size", 2), "dcp_size: got 2"),
        (put("layers[0]", "is_cross_attention", True), "is_cross_attention: got cross attention in layer 0"),
        (put("layers[0]", "attn_type", SimpleNamespace(value="encoder_only")), "attn_type: got encoder_only"),
        (put("layers[0]", "attn_type", SimpleNamespace(value="decoder_bidirectional")), "decoder_bidirectional"),
        (put("layers[0]", "xai_temperature_len", 5), "xai_temperature_len: got 5"),
        (put("layers[0]", "use_irope", True), "use_irope: got chunked local attention"),
        (put("layers[0]", "pos_encoding_mode", "ROPE_LLAMA"), "pos_encoding_mode: got ROPE_LLAMA"),
        (put("runner", "model", torch.nn.Module()), "layers: got a model without attention layers"),
    ],
)
def test_models(change: Any, told: str) -> None:
    with pytest.raises(Unsupported, match=f"TORCH cannot serve.*\n.*{told}.*--attention-backend triton"):
        made(change)


def test_a_soft_cap_of_another_kind() -> None:
    def change(engine: Engine) -> None:
        engine.layers[0].logit_cap, engine.layers[0].logit_capping_method = 30.0, "sigmoid"

    with pytest.raises(Unsupported, match="logit_capping_method: got sigmoid in layer 0"):
        made(change)
    for cap in (0.0, None, -1.0):  # a layer without one is not capped in any way
        engine = Engine("TORCH", FULL)
        engine.layers[0].logit_cap, engine.layers[0].logit_capping_method = cap, "sigmoid"
        assert not [*reject_layer(engine.layers[0])]


def test_layers_of_one_id() -> None:
    engine = Engine("TORCH", Shape())
    engine.layers[1].layer_id = 0
    with pytest.raises(Unsupported, match="two layers of layer_id 0 that differ"):
        SGLangAttention("TORCH", engine.runner)


def test_pools() -> None:
    engine = Engine("TORCH", FULL)
    for buffers in (engine.pool.k_buffer, engine.pool.v_buffer):
        buffers[:] = [buffer.unflatten(2, (2, 8)) for buffer in buffers]
    with pytest.raises(Unsupported, match="kv_cache_layout: got buffers of shape"):
        SGLangAttention("TORCH", engine.runner)
    unified = type("UnifiedPool", (), {"__module__": "sglang.srt.mem_cache.unified_memory_pool"})
    with pytest.raises(Unsupported, match="token_to_kv_pool: got UnifiedPool"):
        made(put("runner", "token_to_kv_pool", unified()))


def test_a_backends_own_reasons() -> None:
    with pytest.raises(Unsupported, match=r"head_dim: got 16"):
        Engine("FLASHINFER_EMULATED", Shape(dtype=torch.float16, cache_dtype=torch.float16))
    with pytest.raises(ValueError, match="gather"):
        Engine("TORCH", Shape(options={"gather": 1}))


@pytest.mark.parametrize("mode", ["PREBUILT", "DLLM_EXTEND"])
def test_modes(mode: str) -> None:
    engine = Engine("TORCH", FULL)
    step = engine.make("DECODE", [(0, 1)])
    step.batch.forward_mode = type(step.batch.forward_mode)[mode]
    with pytest.raises(Unsupported, match=f"forward_mode: got {mode}; supported: EXTEND, MIXED"):
        engine.attention.init_forward_metadata(step.batch)


def test_graphs() -> None:
    engine = Engine("TORCH", FULL)
    engine.attention.init_cuda_graph_state(2, 6)
    engine.attention.init_cuda_graph_state(3, 6)  # larger, as none is captured
    with pytest.raises(Unsupported, match="EXTEND in a CUDA graph; supported: DECODE, TARGET_VERIFY"):
        GraphRunner(engine, 2, "EXTEND", 2)
    GraphRunner(engine, 2)
    engine.attention.init_cuda_graph_state(2, 4)
    with pytest.raises(RuntimeError, match="buffers never grow"):
        engine.attention.init_cuda_graph_state(4, 6)


def test_a_tree_of_drafts() -> None:
    """A chain has a mask too; what a draft branches by says which it is."""
    engine = Engine("TORCH", FULL)
    engine.run("EXTEND", [(0, 5)])
    step = engine.make("TARGET_VERIFY", [(0, 3)])
    step.batch.spec_info = SimpleNamespace(topk=1, custom_mask=torch.ones(24))
    engine.attention.init_forward_metadata(step.batch)
    step.batch.spec_info.topk = 4
    with pytest.raises(Unsupported, match="topk: got a tree of drafts, topk 4"):
        engine.attention.init_forward_metadata(step.batch)
    engine.runner.server_args.speculative_eagle_topk = 2
    step.batch.spec_info = SimpleNamespace()
    with pytest.raises(Unsupported, match="a tree of drafts, topk 2"):
        SGLangAttention("TORCH", engine.runner).init_forward_metadata(step.batch)


def test_arguments() -> None:
    engine = Engine("TORCH", Shape(kinds=(Kind(sinks=True), Kind())))
    step = engine.make("EXTEND", [(0, 3)])
    engine.attention.init_forward_metadata(step.batch)
    given = (step.queries[0], step.keys[0], step.values[0])
    call = engine.attention.forward_extend
    for name in ("k_rope", "score_mod", "something_new"):
        with pytest.raises(Unsupported, match=f"{name}: got given; supported: left out"):
            call(*given, engine.layers[0], step.batch, **{name: torch.ones(1)})
    with pytest.raises(Unsupported, match="layer 0 called without sinks; supported: sinks=True"):
        call(*given, engine.layers[0], step.batch, k_rope=None)
    with pytest.raises(Unsupported, match="layer 1 called with sinks; supported: sinks=False"):
        call(*given, engine.layers[1], step.batch, sinks=torch.ones(4))


def test_limits() -> None:
    """The largest step is a prompt with rows that decode beside it, or the drafts of all rows."""
    none = SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=None)
    assert most_tokens(none, 4, 100) == 104
    assert most_tokens(SimpleNamespace(chunked_prefill_size=512, max_prefill_tokens=300), 4, 100) == 516
    assert most_tokens(SimpleNamespace(speculative_num_draft_tokens=64), 4, 100) == 256


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.adapters.engine_version.version", lambda package: "0.5.23")


@pytest.mark.usefixtures("_installed")
def test_the_plugin_adds_names_alone() -> None:
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry

    before = dict(attention_registry.ATTENTION_BACKENDS)
    for _ in range(2):
        plugin.register()
    ours = {f"attn_backends_{name.lower()}" for name in (*backends, AUTO)}
    assert set(attention_registry.ATTENTION_BACKENDS) == set(before) | ours
    drafts = getattr(server_args, "DRAFT_ATTENTION_BACKEND_CHOICES", None)  # old versions have no list for them
    for known in (server_args.ATTENTION_BACKEND_CHOICES, *([] if drafts is None else [drafts])):
        assert sorted(name for name in known if name.startswith("attn_backends_")) == sorted(ours)  # each once
    made = attention_registry.ATTENTION_BACKENDS["attn_backends_torch"](Engine("TORCH", FULL).runner)
    assert made.pools[0].plans.backend.get_name() == "TORCH"


@pytest.mark.parametrize("version", ["0.5.13", "0.5.24", "0.6.0"])
def test_untested_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.adapters.engine_version.version", lambda package: version)
    with pytest.raises(UntestedEngine, match=rf"sglang is {version}.*0\.5\.14 to 0\.5\.23.*ALLOW_UNTESTED=1"):
        plugin.register()
    monkeypatch.setenv("ATTN_BACKENDS_ALLOW_UNTESTED", "1")
    plugin.register()


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.read_options() == {}
    monkeypatch.setenv("ATTN_BACKENDS_SGLANG_OPTIONS", '{"gather_together_bytes": 1024}')
    runner = Engine("TORCH", FULL).runner
    assert plugin.make_backend("TORCH", runner).pools[0].plans.options.gather_together_bytes == 1024
    for wrong in ("{", "[1]"):
        monkeypatch.setenv("ATTN_BACKENDS_SGLANG_OPTIONS", wrong)
        with pytest.raises(ValueError, match=r"ATTN_BACKENDS_SGLANG_OPTIONS is"):
            plugin.read_options()


def test_sglang_finds_it() -> None:
    """By the entry point that the package declares."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["sglang.srt.plugins"]["attn_backends"].partition(":")
    assert getattr(importlib.import_module(module), function) is plugin.register
