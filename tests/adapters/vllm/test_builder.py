"""The metadata builder, over stand-ins for the base classes that it takes of vLLM."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

from attn_backends import Unsupported
from attn_backends.adapters.vllm import versions
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, plan_groups
from tests.adapters.vllm.test_batch import PAGE, batch, on_a_gpu

MetadataT = TypeVar("MetadataT")
LEVELS = {"NEVER": 0, "UNIFORM_SINGLE_TOKEN_DECODE": 1, "UNIFORM_BATCH": 2, "ALWAYS": 3}
OURS = ("builder", "layers", "mla", "backend", "served")  # modules that import vLLM


class Base(Generic[MetadataT]):
    def __init__(self, *given: Any) -> None:
        if len(given) == 4:  # a builder
            self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = given


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's `builder` and `layers`, imported anew."""
    theirs: Any = ModuleType("vllm.v1.attention.backend")
    theirs.AttentionCGSupport = enum.Enum("AttentionCGSupport", LEVELS)  # type: ignore[misc]
    theirs.AttentionMetadataBuilder = theirs.AttentionImpl = Base
    theirs.AttentionType = SimpleNamespace(DECODER="decoder")
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", theirs)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"attn_backends.adapters.vllm.{name}", raising=False)
    monkeypatch.setattr(versions, "vllm_version", lambda: (0, 32))
    from attn_backends.adapters.vllm import builder, layers

    monkeypatch.setattr(layers, "vllm_version", lambda: (0, 32))
    yield SimpleNamespace(builder=builder, layers=layers)
    for name in OURS:
        sys.modules.pop(f"attn_backends.adapters.vllm.{name}", None)


def built(
    adapter: Any, *, ours: str = "TORCH", speculates: bool = False, device: str = "cpu", mixed: str = "NONE",
    layout: str = "LBNHC", **options: Any,
) -> Any:  # fmt: skip
    """A builder of one layer, of TORCH, which asks nothing of its device. `mixed`: how vLLM runs mixed batches."""
    impl = type("Impl", (adapter.layers.ServedImpl,), {"ours": ours})
    layers = {
        name: SimpleNamespace(
            impl=impl(4, 32, 32**-0.5, 2, sliding_window=window), dtype=torch.float32, layer_name=name
        )
        for name, window in (("layer", None), ("other", 20))
    }
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=layers,
            cudagraph_mode=SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name=mixed)),
        ),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(name=layout)),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=speculates),
        model_config=SimpleNamespace(max_model_len=256),
        additional_config={"attn_backends": {"options": options}},
        speculative_config=object() if speculates else None,
    )  # fmt: skip
    cls = type("Builder", (adapter.builder.ServedBuilder,), {"ours": ours, "_check": lambda *given: None})
    return cls(SimpleNamespace(block_size=PAGE), ["layer"], config, torch.device(device))


def lens_planned_with(builder: Any, theirs: Any, **how: Any) -> list[int]:
    """The host's lengths of the batch that is planned."""
    seen: list[Any] = []
    plan = builder.plans.plan
    builder.plans.plan = lambda common, **given: (seen.append(common), plan(common, **given))[1]
    builder.build(0, theirs) if not how else builder.build_for_drafting(theirs, **how)
    assert not seen[-1].seq_lens_are_upper_bounds  # TORCH refuses them
    lens: list[int] = seen[-1].seq_lens_cpu.tolist()
    return lens


def test_exact_lengths_are_taken_as_they_are(adapter: Any) -> None:
    assert lens_planned_with(built(adapter), on_a_gpu(batch([1, 1], [9, 4]), [9, 4])) == [9, 4]


def test_upper_bounds_are_read_off_the_device_where_plans_need_them(adapter: Any) -> None:
    """With speculation under asynchronous scheduling the host assumes that every draft was taken."""
    builder = built(adapter, speculates=True)
    assert lens_planned_with(builder, on_a_gpu(batch([3, 3], [9, 4]), [12, 7])) == [9, 4]


def test_a_draft_models_lengths_are_never_the_hosts(adapter: Any) -> None:
    """Rejected tokens were taken off on the device alone, without asynchronous scheduling too."""
    theirs = on_a_gpu(batch([1, 1], [9, 4]), [12, 7])
    assert lens_planned_with(built(adapter), theirs, draft_index=1) == [9, 4]


def test_layers_may_come_later(adapter: Any) -> None:
    """vLLM makes the builder of a draft model's layers with the first, and adds the others to its list."""
    builder, names = built(adapter), ["layer"]
    assert list(builder.build(0, batch([1], [3])).steps) == names
    builder.layer_names.append("other")
    served = builder.build_for_drafting(batch([1], [3]), 0)
    assert list(served.steps) == [*names, "other"]
    other = builder.vllm_config.compilation_config.static_forward_context["other"].impl
    assert other.impl.spec.window_left == 19
    assert len(builder.plans.builders) == 2


@pytest.mark.parametrize(("theirs", "ours"), [("LBNHC", "NHD"), ("LBHNC", "HND")])
def test_a_cache_lies_as_vllm_says(adapter: Any, theirs: str, ours: str) -> None:
    assert built(adapter, layout=theirs).plans.cache.layout == ours


def test_a_step_may_have_a_token_of_each_row(adapter: Any) -> None:
    """vLLM pads decodes to the largest size of its graphs, whatever tokens it schedules at most."""
    builder = built(adapter)
    builder.vllm_config.scheduler_config.max_num_batched_tokens = 4
    builder._set_up()
    assert builder.plans.limits.max_num_tokens == builder.plans.limits.max_num_requests == 8


def test_drafts_are_built_fast(adapter: Any) -> None:
    builder, theirs, seen = built(adapter), batch([1], [3]), []
    plan = builder.plans.plan
    builder.plans.plan = lambda common, **given: (seen.append(given["fast_build"]), plan(common, **given))[1]
    builder.build(0, theirs)
    builder.build(0, theirs, fast_build=True)
    builder.build_for_drafting(theirs, 0)
    assert seen == [False, True, True]


@pytest.mark.parametrize(
    ("speculates", "device", "waits"), [(True, "meta", True), (False, "meta", False), (True, "cpu", False)]
)
def test_it_says_that_steps_wait(
    adapter: Any, caplog: pytest.LogCaptureFixture, speculates: bool, device: str, waits: bool
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.attn_backends"):
        built(adapter, speculates=speculates, device=device)
    assert ("every step waits for the device" in caplog.text) == waits


def test_rows_are_brought_to_the_front_for_builders_that_want_it(adapter: Any) -> None:
    from attn_backends.interface import AttentionMetadataBuilder

    builder = built(adapter)
    assert builder.reorder_batch_threshold == builder.plans.builders[0].decode_threshold
    anyhow = SimpleNamespace(builders=[type("Any", (), {"reorder_batch": AttentionMetadataBuilder.reorder_batch})()])
    assert adapter.builder.decode_threshold_of(anyhow) is None


def test_rows_in_front_are_those_that_all_layers_decode(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON on Hopper: of 8 queries for a KV head rows of 2 tokens, of 4 such rows of 4."""
    rules = pytest.importorskip("attn_backends.backends.triton.rules", reason="needs triton")
    monkeypatch.setattr(rules, "suits_hopper_kernel", lambda *given: True)
    layers = {heads: AttentionSpec(heads, 2, 64, dtype=torch.bfloat16) for heads in (16, 8)}
    builder_cls = get_backend("TRITON").get_builder_cls()
    builders = [builder_cls(group, KVCacheSpec(64, 16), Limits(8, 64, 256), "cpu") for group in plan_groups(layers)]
    assert [each.decode_threshold for each in builders] == [2, 4]
    for given in (builders, builders[::-1]):
        assert adapter.builder.decode_threshold_of(SimpleNamespace(builders=given)) == 2


@pytest.mark.parametrize(
    ("ours", "device", "level"),
    [("TORCH", "cpu", "NEVER"), ("TORCH", "cuda", "UNIFORM_BATCH"), ("TRITON", "cuda", "ALWAYS")],
)
def test_graphs_are_of_the_backends_level(adapter: Any, ours: str, device: str, level: str) -> None:
    pytest.importorskip("triton", reason="TRITON needs triton")
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    assert type(built(adapter, ours=ours)).get_cudagraph_support(config, None).name == level


def test_a_graph_serves_the_longest_rows(adapter: Any) -> None:
    """vLLM does not ask before a replay: a graph that a long row could not run is refused when it is captured."""
    with pytest.raises(Unsupported, match=r"cuda_graph: got rows of 1 tokens and up to 256 keys.*PIECEWISE"):
        built(adapter, graph_max_seq_len=64).build_for_cudagraph_capture(batch([1, 1], [3, 3]))
    builder, first = built(adapter, graph_max_seq_len=256), batch([1, 1], [3, 3])
    captured = builder.build_for_cudagraph_capture(first)
    assert builder.build(0, first).steps["layer"] is captured.steps["layer"]
    assert builder.build(0, batch([1, 1], [3, 3])).steps["layer"] is not captured.steps["layer"]


def test_mixed_graphs_are_refused_for_backends_without(adapter: Any) -> None:
    """vLLM lowers its mode by the level that is declared: here it has not."""
    with pytest.raises(Unsupported, match=r"cuda_graph: got rows of 3 tokens.*PIECEWISE"):
        built(adapter, mixed="FULL").build_for_cudagraph_capture(batch([3, 3], [3, 3]))
