"""Two backends over one cache: which rows go where, what is refused, options of each, and the engine on such a pair."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import (
    LLM,
    AttentionSpec,
    CudaGraphSupport,
    EngineConfig,
    KVCacheSpec,
    SamplingParams,
    Unsupported,
    get_backend,
    load_config,
    register_backend,
    select_backend,
)
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.interface.phases import Phases
from attn_backends.registry import BackendImportError, UnknownBackendError, explain, explain_for, validate_options
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.cases.features import plain_spec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.simulator import GraphSimulator
from attn_backends.testing.harness import assert_matches, assert_pool, make_layer, run_backend
from attn_backends.validation import ConfigError
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)
from tests.helpers.fake_backends import fake_backend
from tests.helpers.tiny_models import save_tiny

sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugin"))
import attn_backends_naive as naive  # it registers NAIVE

PAIR = "prefill=NAIVE,decode=TORCH"
LAYER, CACHE = AttentionSpec(4, 2, 32), KVCacheSpec(64, 16)


def refusal(name: str, spec: AttentionSpec = LAYER, cache: KVCacheSpec = CACHE, device: str = "cpu") -> str:
    with pytest.raises(Unsupported) as caught:
        select_backend(name, [spec], cache, device)
    assert explain_for(name, spec, cache, device) == [str(found) for found in caught.value.rejections]
    return str(caught.value)


# ---- Names. ---------------------------------------------------------------------------------------------------------


def test_a_pair_has_one_name_in_any_writing() -> None:
    pair = get_backend(PAIR)
    assert get_backend(" decode = torch , PREFILL=naive") is pair
    assert pair.get_name() == "PREFILL=NAIVE,DECODE=TORCH"
    assert pickle.loads(pickle.dumps(pair)) is pair
    selection = pickle.loads(pickle.dumps(select_backend(PAIR, [LAYER], CACHE, "cpu")))
    assert (selection.name, selection.backend) == (pair.get_name(), pair)
    assert get_backend("prefill=torch,decode=TORCH") is get_backend("TORCH")


@pytest.mark.parametrize(
    "name", ["prefill=TORCH", "prefill=TORCH,prefill=NAIVE", "prefill=TORCH,verify=NAIVE", "=", "prefill=,decode=TORCH",
             "prefill=TORCH,decode=NAIVE,verify=TORCH", "prefill=AUTO,decode=TORCH"],
)  # fmt: skip
def test_other_writings_are_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(ValueError, match="write prefill=NAME,decode=NAME"):
        get_backend(name)


def test_unknown_and_missing_parts_are_named() -> None:
    with pytest.raises(UnknownBackendError, match="'TORHC'; did you mean TORCH"):
        get_backend("prefill=TORCH,decode=TORHC")
    register_backend("GONE", "no_such_module:Class", install="pip install gone")
    with pytest.raises(BackendImportError, match=r"GONE module 'no_such_module' is not installed.*pip install gone"):
        get_backend("prefill=GONE,decode=TORCH")
    with pytest.raises(ValueError, match="without = and ,"):
        register_backend("A=B", "module:Class")


def test_a_part_that_is_registered_anew_is_the_new_one() -> None:
    register_backend("PART", fake_backend("PART"), override=True)
    before = get_backend("prefill=TORCH,decode=PART")
    register_backend("PART", again := fake_backend("PART", "Other"), override=True)
    assert get_backend("prefill=TORCH,decode=PART") is not before
    assert get_backend("prefill=TORCH,decode=PART").phases == Phases(get_backend("TORCH"), again)  # type: ignore[attr-defined]


# ---- What is refused. -----------------------------------------------------------------------------------------------


def test_what_one_phase_cannot_serve_is_refused_in_its_name() -> None:
    told = refusal(PAIR, AttentionSpec(4, 2, 32, window_left=7))
    assert "window: got window_left=7; supported: layers without it (prefill by NAIVE)" in told
    assert "decode by TORCH" not in told
    told = refusal("prefill=TORCH,decode=TRITON")
    assert "device: got cpu; supported: cuda (decode by TRITON)" in told
    told = refusal("prefill=TORCH_MLA,decode=TORCH")
    assert "mla: got plain attention; supported: MLA (a latent cache) (prefill by TORCH_MLA)" in told


def test_pages_layouts_and_cache_dtypes_that_only_one_serves_are_refused() -> None:
    floats = {"dtypes": {torch.float32}, "layouts": {"NHD"}}
    register_backend("LARGE", fake_backend("LARGE", page_size_multiple=32, **floats), override=True)
    name = "prefill=TORCH,decode=LARGE"
    assert "page_size: got 16; supported: multiples of 32 (decode by LARGE)" in refusal(name)
    assert "layout: got HND; supported: NHD (decode by LARGE)" in refusal(name, cache=KVCacheSpec(8, 32, "HND"))
    narrow = AttentionSpec(4, 2, 32, cache_dtype=torch.float16)
    assert "cache_dtype: got float16; supported: float32 (decode by LARGE)" in refusal(name, narrow, KVCacheSpec(8, 32))
    caches = [KVCacheSpec(8, size) for size in (16, 32)]
    assert select_backend(name, [LAYER], caches, "cpu").cache.page_size == 32


def test_caches_of_other_shapes_or_strides_are_not_shared() -> None:
    wide, turned = fake_backend("WIDE"), fake_backend("TURNED")
    wide.get_kv_cache_shapes = staticmethod(lambda spec, cache: ((cache.pages, 7),))  # type: ignore[method-assign]
    turned.get_kv_cache_stride_order = staticmethod(lambda layout: (3, 2, 1, 0))  # type: ignore[method-assign]
    for backend in (wide, turned):
        register_backend(backend.name, backend, override=True)
    told = refusal("prefill=WIDE,decode=TORCH")
    assert "kv_cache_shapes: got ((64, 7),) of WIDE (prefill); supported: ((64, 16, 2, 32)" in told
    assert "Choose WIDE or TORCH for both phases, or another pair." in told
    assert "kv_cache_strides: got (0, 1, 2, 3) of TORCH (prefill)" in refusal("prefill=TORCH,decode=TURNED")
    unknown = KVCacheSpec(None, 16)  # an engine that asks before it knows the number of pages
    assert "of WIDE" in explain_for("prefill=WIDE,decode=TORCH", LAYER, unknown, "cpu")[0]


def test_explain_has_the_pairs_verdict_beside_the_others() -> None:
    found = explain(PAIR, [LAYER], CACHE, "cpu")
    assert found.chosen == found.asked == "PREFILL=NAIVE,DECODE=TORCH"
    assert {"TORCH", found.asked} <= {row["name"] for row in found.to_dict()["backends"]}
    assert explain("prefill=TORCH,decode=TRITON", [LAYER], CACHE, "cpu").chosen is None


def test_a_pair_can_what_both_can_and_its_graphs_are_decodes() -> None:
    pair, other = (get_backend(name).capabilities() for name in (PAIR, "prefill=TORCH,decode=NAIVE"))
    assert pair.cuda_graph is CudaGraphSupport.UNIFORM_BATCH
    assert other.cuda_graph is CudaGraphSupport.NEVER
    assert not pair.window
    assert pair.devices == {"cpu"}
    assert pair.dtypes == {torch.float32, torch.float64}
    assert get_backend("prefill=TORCH,decode=TRITON").capabilities().head_dims == (
        get_backend("TRITON").capabilities().head_dims
    )


# ---- Rows. ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Query tokens that each backend has attended."""
    seen: Counter[str] = Counter()
    for name, impl_cls in (("NAIVE", naive.NaiveImpl), ("TORCH", TorchImpl)):

        def attend(self: Any, query: Any, *args: Any, name: str = name, inner: Any = impl_cls.attend) -> None:
            seen[name] += len(query)
            inner(self, query, *args)

        monkeypatch.setattr(impl_cls, "attend", attend)
    return seen


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "expected"),
    [
        ((9, 30), (1, 1), {"TORCH": 2}),
        ((9, 30), (9, 4), {"NAIVE": 13}),
        ((9, 30, 20, 5), (1, 1, 20, 3), {"TORCH": 2, "NAIVE": 23}),
        ((30, 9), (5, 1), {"NAIVE": 6}),  # a decode behind a prefill goes with it
    ],
)
@pytest.mark.parametrize("num_padded_reqs", [0, 2])
def test_each_row_is_attended_by_its_phases_backend(
    tokens: Counter[str], seq_lens: tuple[int, ...], query_lens: tuple[int, ...], expected: dict[str, int],
    num_padded_reqs: int,
) -> None:  # fmt: skip
    pair = get_backend(PAIR)
    batch = random_batch(pair, plain_spec(pair.capabilities()), seq_lens, query_lens)
    result = run_backend(pair, batch, want_lse=True, num_padded_reqs=num_padded_reqs)
    assert_matches(result, batch)
    assert tokens == expected


def test_views_of_a_mixed_batch_have_one_part_each() -> None:
    pair = get_backend(PAIR)
    shape = load_cases().batches["mixed_small"]
    batch = random_batch(pair, plain_spec(pair.capabilities()), shape.seq_lens, shape.query_lens)
    metadata = make_layer(pair, batch).builder.build(0, batch.common())
    assert metadata.decode_metadata.prefill is None
    assert metadata.prefill_metadata.decode is None
    assert metadata.decode_metadata.decode.num_tokens == metadata.num_decode_tokens
    assert metadata.prefill_metadata.prefill.num_tokens == metadata.num_prefill_tokens


# ---- The engine. ----------------------------------------------------------------------------------------------------


def generate(folder: Path, simulate: bool, **settings: Any) -> tuple[list[tuple[int, ...]], LLM]:
    given = {"accelerate": "off", "cache": {"num_pages": 64}, "scheduler": {"max_num_tokens": 9}}
    config = EngineConfig.model_validate(given | settings)
    llm = LLM.from_pretrained(folder, config, recorder=GraphSimulator(refuse_unreachable=True) if simulate else None)
    prompts = ["a", "one two three", "the quick brown fox", "xyz" * 12]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    return [output.token_ids for output in outputs], llm


def test_the_engine_runs_a_pair_and_captures_decodes(tmp_path: Path, tokens: Counter[str]) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    expected, _ = generate(folder, False, backend="TORCH")
    tokens.clear()
    found, llm = generate(folder, True, backend={"prefill": "NAIVE", "decode": "TORCH"}, dtype="float32")
    assert found == expected
    assert llm.selection.name == "PREFILL=NAIVE,DECODE=TORCH"
    assert llm.stats.num_graph_steps > 0
    assert tokens["NAIVE"] > 0 < tokens["TORCH"]


# ---- Settings and options. ------------------------------------------------------------------------------------------


def test_a_pair_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text("backend: {prefill: NAIVE, decode: TORCH}\n")
    assert load_config(file, environ={}).backend == PAIR
    assert load_config(environ={"ATTN_BACKENDS_BACKEND": "{prefill: NAIVE, decode: TORCH}"}).backend == PAIR
    assert load_config(environ={"ATTN_BACKENDS_BACKEND": PAIR}).backend == PAIR
    for wrong in ("{prefill: NAIVE}", "{prefill: NAIVE, decode: 3}", "{prefill: NAIVE, decode: TORCH, x: Y}"):
        file.write_text(f"backend: {wrong}\n")
        with pytest.raises(
            ConfigError, match=r"allowed: a name, or the names of two backends, such as \{prefill: TORCH"
        ):
            load_config(file, environ={})


def test_each_has_its_own_options() -> None:
    options = validate_options(PAIR, {"prefill": {"accumulate": "float32"}, "decode": {"graph_max_seq_len": 50}})
    assert isinstance(options, Phases)
    assert (options.prefill.accumulate, options.decode.graph_max_seq_len) == ("float32", 50)
    assert validate_options(PAIR, {}) is None
    with pytest.raises(ConfigError, match=r"backend_options.decode.graph_max_seq_len .*got 0"):
        validate_options(PAIR, {"decode": {"graph_max_seq_len": 0}})
    with pytest.raises(ConfigError, match=r"given: accumulate\. Write backend_options: \{prefill: "):
        validate_options(PAIR, {"accumulate": "float32"})
    pair, batch = get_backend(PAIR), KVCacheSpec(4)
    impl = pair.get_impl_cls()(LAYER, batch, "cpu", options=options)
    assert (impl.prefill.options, impl.decode.options) == tuple(options)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "pair", ["prefill=FLASHINFER_EMULATED,decode=TORCH", "prefill=TORCH,decode=FLASHINFER_EMULATED"]
)
def test_a_step_of_an_earlier_plan_is_refused_as_a_whole(pair: str) -> None:
    """Neither phase writes its keys, whichever of them was planned again."""
    backend, spec = get_backend(pair), AttentionSpec(4, 2, 64, dtype=torch.float16)
    first, second = (random_batch(backend, spec, [40, 17], [1, 9], seed=seed) for seed in (0, 1))
    layer = make_layer(backend, first, second)
    earlier, later, pool = layer.begin(first), layer.begin(second), first.fresh_pool()
    with pytest.raises(RuntimeError, match="of an earlier plan"):
        layer.forward(first, earlier, kv_cache=pool)
    assert_pool(pool, first.fresh_pool())
    assert_matches(layer.forward(second, later), second)
