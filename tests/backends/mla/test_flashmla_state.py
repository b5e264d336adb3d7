"""FLASHMLA's schedules in both generations, its providers, and what each wrong use is told."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Unsupported, get_backend, select_backend
from attn_backends.backends.mla.flashmla import library as flashmla_kernels
from attn_backends.backends.mla.flashmla.library import PROVIDERS, FilledSchedule, Kernels, MadeSchedule, load_kernels
from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.registry import validate_options
from attn_backends.registry.support import all_support
from attn_backends.registry.table import BackendImportError
from attn_backends.spec import AttentionType, MLASpec
from attn_backends.testing.conformance import MLAConformance
from attn_backends.testing.graphs.host_reads import GraphViolation
from tests.emulated import flashmla, flashmla_older
from tests.helpers.flashmla_emulated import EmulatedFlashMLA, EmulatedOlderFlashMLA, NewerState, OlderState

GENERATIONS = [pytest.param(flashmla, id="newer"), pytest.param(flashmla_older, id="older")]
HALF: dict[str, Any] = {"dtype": torch.bfloat16}


def rows(*seq_lens: int, in_graph: bool = False) -> DecodeRows:
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    table = torch.arange(4 * len(lens), dtype=torch.int32).view(len(lens), 4)
    idle = lens == 0 if in_graph else None
    return DecodeRows(len(lens), 1, table, lens, lens, idle)


# Schedules.


class Call:
    """A layer's call over some rows."""

    def __init__(self, module: Any, num_qo_heads: int = 4) -> None:
        torch.manual_seed(0)
        self.kernels = Kernels(module)
        self.query = torch.randn(3, 1, num_qo_heads, 576).bfloat16()
        self.cache = torch.randn(12, 64, 576).bfloat16()

    def __call__(self, given: DecodeRows, schedule: tuple[Any, Any]) -> torch.Tensor:
        output = self.query.new_empty(3, 1, self.query.shape[2], 512)
        self.kernels.run(self.query, self.cache, given.page_table, given.seq_lens, schedule, 0.1, output)
        return output


@pytest.mark.parametrize("module", GENERATIONS)
def test_a_schedule_is_for_one_set_of_lengths(module: Any) -> None:
    call, short, long = Call(module), rows(5, 70, 130), rows(200, 70, 250)
    made = MadeSchedule(call.kernels) if module is flashmla_older else FilledSchedule(call.kernels, in_graph=False)
    made.plan(short, 4)
    assert call(short, made.of("layer")).isfinite().all()
    assert call(short, made.of("next layer")).isfinite().all()
    assert call(long, made.of("layer")).isnan().all()
    made.plan(long, 4)
    assert call(long, made.of("layer")).isfinite().all()


def test_made_schedules_are_refilled_where_they_lie() -> None:
    made = MadeSchedule(Kernels(flashmla_older))
    made.plan(rows(5, 70, 130), 128)
    first = [(tensor.data_ptr(), tensor.clone()) for tensor in made.of(None)]
    assert [list(tensor.shape) for _, tensor in first] == [[66, 8], [4]]
    made.plan(rows(200, 70, 250), 128)
    again = [(tensor.data_ptr(), tensor) for tensor in made.of(None)]
    assert [address for address, _ in first] == [address for address, _ in again]
    assert not first[0][1].equal(again[0][1])


def test_in_a_graph_the_first_layer_of_every_pass_fills_the_schedule() -> None:
    """A warm-up pass must not leave a filled one to the pass that is captured."""
    call, given = Call(flashmla), rows(5, 70, 130, in_graph=True)
    filled = FilledSchedule(call.kernels, in_graph=True)
    filled.plan(given, 4)
    seen = []
    for layer in ("first", "second", "third") * 2:
        schedule = filled.of(layer)
        seen.append((id(schedule[0]), schedule[0].have_initialized))
        call(given, schedule)
    assert [was_filled for _, was_filled in seen] == [False, True, True] * 2
    assert len({held for held, _ in seen[:3]}) == len({held for held, _ in seen[3:]}) == 1


class NeverRefilled(NewerState):
    """Captures whatever the warm-up has filled."""

    def _new_schedule(self, rows: DecodeRows) -> Any:
        return FilledSchedule(self.kernels, in_graph=False)


class KeptAsCaptured(OlderState):
    """Leaves the schedule of the capture to every replay."""

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Any:
        return held or super().plan_decode(spec, rows, None)


@pytest.mark.parametrize(
    ("base", "state"), [(EmulatedFlashMLA, NeverRefilled), (EmulatedOlderFlashMLA, KeptAsCaptured)]
)
def test_the_kit_finds_stale_schedules_in_graphs(base: Any, state: Any) -> None:
    backend = type("Stale", (base,), {"state_cls": state})
    kit: Any = type("Kit", (MLAConformance,), {"backend_name": base.get_name(), "backend": backend})()
    with pytest.raises((AssertionError, GraphViolation), match=r"off by inf|is gone, and the graph uses it"):
        kit.test_replays_equal_the_reference("plain")


# Providers.


def fake(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def test_without_a_provider_the_reasons_of_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in PROVIDERS.values():
        monkeypatch.setitem(sys.modules, path, None)  # what `import` then raises is a ModuleNotFoundError
    with pytest.raises(ModuleNotFoundError) as caught:
        load_kernels()
    assert all(f"{name}: " in str(caught.value) for name in PROVIDERS)
    monkeypatch.setattr("attn_backends.registry.table._classes", {})
    with pytest.raises(BackendImportError, match=r"no provider of FlashMLA imports.*Try: pip install"):
        get_backend("FLASHMLA")
    row = next(row for row in all_support() if row.name == "FLASHMLA")
    assert not row.usable
    assert row.capabilities is not None
    assert row.capabilities["page_sizes"] == [64]


def test_the_first_provider_that_imports_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in PROVIDERS.values():
        monkeypatch.setitem(sys.modules, path, None)
    members = {"get_mla_metadata": flashmla_older.get_mla_metadata,
               "flash_mla_with_kvcache": flashmla_older.flash_mla_with_kvcache}  # fmt: skip
    monkeypatch.setitem(sys.modules, "sgl_kernel", fake("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", fake("sgl_kernel.flash_mla", **members))
    for provider in ("auto", "sgl_kernel"):
        assert not load_kernels(provider).fills_schedules
    with pytest.raises(ModuleNotFoundError, match=r"no provider of FlashMLA imports \(vllm: "):
        load_kernels("vllm")


def test_a_broken_provider_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> Any:
        if path == "flash_mla":
            raise OSError("libcudart.so.12: cannot open shared object file")
        raise ModuleNotFoundError(f"No module named {path!r}")

    monkeypatch.setattr(flashmla_kernels.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"flash_mla: OSError: libcudart") as caught:
        load_kernels()
    assert not isinstance(caught.value, ModuleNotFoundError)


def test_providers_are_options() -> None:
    for provider in ("auto", *PROVIDERS):
        options: Any = validate_options("FLASHMLA_EMULATED", {"provider": provider})
        assert options.provider == provider
    with pytest.raises(ValueError, match="provider"):
        validate_options("FLASHMLA_EMULATED", {"provider": "vllm.third_party"})


# What is refused at selection.

REFUSED: list[tuple[AttentionSpec, dict[str, Any], str]] = [
    (AttentionSpec(16, 1, 64, **HALF), {}, "mla: got plain attention; supported: MLA"),
    (MLASpec(16, **HALF), {"page_size": 16}, "page_size: got 16; supported: 64"),
    (MLASpec(513, **HALF), {}, "num_qo_heads: got 513; supported: 1 to 512"),
    (MLASpec(16, kv_lora_rank=256, **HALF), {}, "kv_lora_rank: got 256; supported: 512"),
    (MLASpec(16, qk_rope_head_dim=32, **HALF), {}, "qk_rope_head_dim: got 32; supported: 64"),
    (MLASpec(16, dtype=torch.float32), {}, "dtype: got float32; supported: bfloat16, float16"),
    (MLASpec(16, cache_dtype=torch.float8_e5m2, **HALF), {}, "cache_dtype: got float8_e5m2"),
    (MLASpec(16, cache_dtype=torch.float16, **HALF), {}, "cache_dtype: got float16; supported: bfloat16, as the"),
    (MLASpec(16, window_left=64, **HALF), {}, "window: got window_left=64"),
    (MLASpec(16, logits_soft_cap=30.0, **HALF), {}, "soft_cap: got logits_soft_cap=30.0"),
    (MLASpec(2, alibi_slopes=(0.5, 0.25), **HALF), {}, "alibi: got alibi_slopes"),
    (MLASpec(16, attention_type=AttentionType.ENCODER, causal=False, **HALF), {}, "attention_type: got encoder"),
]


@pytest.mark.parametrize(("spec", "cache", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_it_cannot_do_is_refused_at_selection(spec: AttentionSpec, cache: dict[str, Any], told: str) -> None:
    with pytest.raises(Unsupported) as caught:
        select_backend("FLASHMLA_EMULATED", [spec], KVCacheSpec(8, **{"page_size": 64, **cache}), "cpu")
    assert told in str(caught.value)


def test_a_named_provider_that_is_missing_is_refused_at_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ([MLASpec(16, **HALF)], KVCacheSpec(8, 64), "cpu")
    assert select_backend("FLASHMLA_EMULATED", *where, options={"provider": "sgl_kernel"})
    monkeypatch.setattr(EmulatedFlashMLA.get_state_cls(), "load_kernels", staticmethod(load_kernels))
    with pytest.raises(Unsupported, match=r"provider: got sgl_kernel \(no provider of FlashMLA imports"):
        select_backend("FLASHMLA_EMULATED", *where, options={"provider": "sgl_kernel"})


@pytest.mark.parametrize(
    ("capability", "told"), [((8, 0), "got 8.0"), ((10, 0), "got 10.0; supported: 9.0"), ((9, 0), "")]
)
def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], told: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = EmulatedFlashMLA.reject(MLASpec(16, **HALF), KVCacheSpec(8, 64), "cuda")
    assert [rejection.code for rejection in found] == (["compute_capability"] if told else [])
    assert told in "".join(map(str, found))
