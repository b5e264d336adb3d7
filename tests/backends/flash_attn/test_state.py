"""FLASH_ATTN's providers, options and steps, and what each wrong use is told."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, Unsupported, get_backend, plan_groups, select_backend
from attn_backends.backends.flash_attn.backend import FlashAttnBackend
from attn_backends.backends.flash_attn.fa2 import FlashAttn2
from attn_backends.backends.flash_attn.fa3 import FlashAttnInterface, VllmFa3
from attn_backends.backends.flash_attn.fa4 import FlashAttn4, is_known
from attn_backends.backends.flash_attn.options import FlashAttnOptions
from attn_backends.backends.flash_attn.provider import choose
from attn_backends.backends.flash_attn.state import PROVIDERS, FlashAttnState, FlashAttnStep
from attn_backends.interface import AttentionStep
from attn_backends.kernels.merge_state import add_sinks
from attn_backends.registry import register_backend, validate_options
from attn_backends.registry.support import support
from attn_backends.registry.table import BackendImportError, get_entry
from attn_backends.spec import AttentionType
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Result, assert_matches, make_layer
from attn_backends.testing.kit.base import KitBase
from attn_backends.testing.quick_check import quick_check
from attn_backends.validation import ConfigError
from tests.emulated import vllm_flash_attn
from tests.helpers import flashinfer_emulated  # noqa: F401 (registers)
from tests.helpers.flash_attn_backends import MODULES, emulated

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 64, dtype=torch.bfloat16)
SLOPES = (0.5, 0.25, 0.1, 0.2)
SMALL, LARGE = KVCacheSpec(64, 16), KVCacheSpec(64, 256)
LIMITS = Limits(4, 64, 512)
FA2, FA3 = "FLASH_ATTN_FLASH_ATTN_EMULATED", "FLASH_ATTN_VLLM_FA3_EMULATED"
FA4 = "FLASH_ATTN_FLASH_ATTN_4_EMULATED"
ALL = tuple(emulated(type(provider)) for provider in PROVIDERS)


class AllState(FlashAttnState):
    providers: ClassVar[Any] = ALL


class AllBackend(FlashAttnBackend):
    providers: ClassVar[Any] = ALL

    name = "FLASH_ATTN_ALL"


register_backend("FLASH_ATTN_ALL", AllBackend, options=FlashAttnOptions)


def state(*specs: AttentionSpec, cache: KVCacheSpec = SMALL, **options: Any) -> AllState:
    groups = plan_groups(dict(enumerate(specs or (SPEC,))))
    return AllState(groups, cache, LIMITS, CPU, options=FlashAttnOptions(**options))


def layer_and_batch(name: str, *seq_lens: int, query_lens: tuple[int, ...] | None = None, **changes: Any) -> Any:
    kit = type("Kit", (KitBase,), {"backend_name": name})()
    shape = BatchShape(seq_lens=seq_lens, query_lens=query_lens or (1,) * len(seq_lens))
    batch = kit.make_batch(kit.make_spec(dtype=torch.bfloat16, **changes), shape)
    return make_layer(kit.backend, batch), batch


# Which provider.


def test_the_best_that_serves_is_chosen_with_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = state(SPEC, replace(SPEC, alibi_slopes=SLOPES))
    assert [choice.provider.name for choice in made.choices.values()] == ["vllm_fa3", "vllm_fa2"]
    told = "FLASH_ATTN uses vllm_fa2: vllm_fa3 was passed over: alibi: got alibi_slopes; supported: layers without it"
    assert told in caplog.text
    assert "flash_attn_interface was passed over: alibi" in caplog.text
    assert "flash_attn was passed over: page_size: got 16; supported: multiples of 256" in caplog.text


@pytest.mark.parametrize("name", ["vllm_fa3", "flash_attn_interface", "flash_attn", "vllm_fa2", "flash_attn_4"])
def test_a_named_provider_is_used(name: str) -> None:
    cache = LARGE if name == "flash_attn" else SMALL
    assert state(cache=cache, provider=name).choices[0].provider.name == name


def test_a_named_provider_is_refused_where_it_does_not_serve() -> None:
    with pytest.raises(Unsupported, match=r"page_size: got 16; supported: multiples of 256 \(flash_attn\)") as caught:
        state(cache=SMALL, provider="flash_attn")
    assert [rejection.code for rejection in caught.value.rejections] == ["page_size"]
    assert state(cache=LARGE).choices[0].provider.name == "flash_attn"


def test_a_named_provider_is_asked_at_selection() -> None:
    caches, options = [SMALL, LARGE], {"provider": "flash_attn"}
    assert select_backend("FLASH_ATTN_ALL", [SPEC], caches, CPU).cache == SMALL
    assert select_backend("FLASH_ATTN_ALL", [SPEC], caches, CPU, options=options).cache == LARGE
    with pytest.raises(Unsupported, match=r"supported: multiples of 256 \(flash_attn\)"):
        select_backend("FLASH_ATTN_ALL", [SPEC], SMALL, CPU, options=options)


def test_flash_attention_4_comes_last() -> None:
    assert [provider.name for provider in PROVIDERS][-1] == "flash_attn_4"
    made = choose(ALL[3:], SPEC, SMALL, CPU)
    assert made.provider.name == "vllm_fa2"
    assert choose(ALL[2::2], SPEC, SMALL, CPU).reason.startswith("flash_attn_4: flash_attn was passed over: page_size")


def test_all_reasons_of_all_providers() -> None:
    with pytest.raises(Unsupported) as caught:
        choose(ALL[:3], replace(SPEC, alibi_slopes=SLOPES), SMALL, CPU)
    told = [(rejection.code, rejection.supported) for rejection in caught.value.rejections]
    assert told == [
        ("alibi", "layers without it (vllm_fa3)"),
        ("alibi", "layers without it (flash_attn_interface)"),
        ("page_size", "multiples of 256 (flash_attn)"),
    ]


def test_options_are_checked() -> None:
    assert validate_options(FA2, {"provider": "flash_attn"}) == FlashAttnOptions(provider="flash_attn")
    with pytest.raises(ConfigError, match="provider"):
        validate_options(FA2, {"provider": "flash_attn_5"})


# What may be missing, or too old.


def test_without_any_provider_the_command_that_fixes_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", raising=False)
    monkeypatch.setattr("attn_backends.registry.table._classes", {})
    with pytest.raises(BackendImportError, match=r"none of the modules flash_attn, .* pip install flash-attn"):
        get_backend("FLASH_ATTN")
    row = support(get_entry("FLASH_ATTN"))
    assert (row.usable, row.fix) == (False, "pip install flash-attn --no-build-isolation")


def test_a_broken_library_is_told_before_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.registry.table._classes", {})
    monkeypatch.setattr(
        "attn_backends.registry.table.importlib.import_module", _raises(flash_attn=OSError("no libcudart"))
    )
    with pytest.raises(BackendImportError, match="OSError: no libcudart"):
        get_backend("FLASH_ATTN")


def _raises(**errors: Exception) -> Any:
    def import_module(name: str) -> Any:
        raise errors.get(name, ModuleNotFoundError(f"No module named {name!r}", name=name))

    return import_module


@pytest.mark.parametrize(
    ("provider", "told"),
    [
        (FlashAttn2({**MODULES[FlashAttn2], "flash_attn": SimpleNamespace(__version__="2.3.1")}),
         "provider: got flash-attn 2.3.1; supported: flash-attn 2.7 to below 2.9. Try: pip install flash-attn"),
        (VllmFa3({"vllm.vllm_flash_attn.flash_attn_interface": SimpleNamespace(flash_attn_varlen_func=lambda q: q)}),
         "takes no s_aux; supported: vllm 0.11 and newer. Try: pip install vllm"),
        (VllmFa3({"vllm.vllm_flash_attn.flash_attn_interface": SimpleNamespace(
            flash_attn_varlen_func=vllm_flash_attn.flash_attn_varlen_func, FA3_AVAILABLE=False)}),
         "got a vLLM without FA3"),
        (FlashAttn4({**MODULES[FlashAttn4], "importlib.metadata": SimpleNamespace(version=lambda name: "4.0.0b35")}),
         "got flash-attn-4 4.0.0b35; supported: flash-attn-4 4.0.0b36 to below 4.1. Try: pip install flash-attn-4"),
        (FlashAttn4({**MODULES[FlashAttn4], "flash_attn.cute.interface": SimpleNamespace(
            _flash_attn_fwd=lambda q, k, v, out, causal: q)}), "takes no cu_seqlens_k, cu_seqlens_q, learnable_sink, "),
        (FlashAttnInterface({"flash_attn_interface": SimpleNamespace()}), "without get_scheduler_metadata"),
        (FlashAttnInterface({"flash_attn_interface": SimpleNamespace(
            get_scheduler_metadata=None, flash_attn_varlen_func=lambda q: q)}), "without return_attn_probs"),
    ],
)  # fmt: skip
def test_libraries_that_are_too_old(provider: Any, told: str) -> None:
    missing = provider.missing()
    assert missing is not None
    assert told in str(missing)
    assert provider.reject(SPEC, LARGE, CPU) == [missing]


@pytest.mark.parametrize(
    ("version", "known"),
    [("4.0.0a40", False), ("4.0.0b35", False), ("4.0.0b36", True), ("4.0.0b37+cu13", True), ("4.0.0rc1", True),
     ("4.0.0", True), ("4.0.2.post1", True), ("4.0.1b1", True), ("4.0.0.dev9", False), ("4.1.0b1", False),
     ("4.1.0", False), ("3.0.0b36", False), ("0.0.0", False)],
)  # fmt: skip
def test_versions_of_flash_attention_4(version: str, known: bool) -> None:
    assert is_known(version) == known


def test_flash_attention_4_under_another_name_is_told() -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    modules = {**MODULES[FlashAttn4], "importlib.metadata": SimpleNamespace(version=version)}
    assert "got no module 'flash-attn-4'" in str(FlashAttn4(modules).missing())


def test_libraries_that_are_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "attn_backends.backends.flash_attn.provider.importlib.import_module",
        _raises(flash_attn=OSError("no libcudart")),
    )
    told = {provider.name: str(kind().missing()) for provider in PROVIDERS for kind in [type(provider)]}
    assert "got OSError: no libcudart" in told["flash_attn"]
    assert "got no module 'flash_attn_interface'" in told["flash_attn_interface"]
    assert told["vllm_fa2"].endswith("Try: pip install vllm")
    assert told["flash_attn_4"].endswith("Try: pip install flash-attn-4")


def test_capabilities_are_those_of_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `doctor` tries a page size that can be served."""
    anew = [type(provider)() for provider in PROVIDERS]  # none of which has found what another test put in its place
    monkeypatch.setattr("attn_backends.backends.flash_attn.backend.PROVIDERS", (*anew, emulated(FlashAttn2)))
    monkeypatch.setattr(FlashAttnInterface, "missing", lambda provider: SPEC)
    monkeypatch.setattr(VllmFa3, "missing", lambda provider: SPEC)
    can = FlashAttnBackend.capabilities()
    assert (can.page_size_multiple, can.fp8_queries) == (256, False)


@pytest.mark.gpu
def test_doctor_finds_nothing_wrong() -> None:
    try:
        backend = get_backend("FLASH_ATTN")
    except BackendImportError as error:
        pytest.skip(str(error))
    wrong = [result for result in quick_check(backend, "cuda") if not result.ok]
    assert not wrong


# Which layers.


@pytest.mark.parametrize(
    ("name", "changes", "cache", "told"),
    [
        (FA2, {"head_dim": 512, "head_dim_vo": 512}, LARGE, "head_dim: got 512; supported: .*256"),
        (FA2, {"dtype": torch.float32, "cache_dtype": torch.float32}, LARGE, "dtype: got float32; supported: bfloat16"),
        (FA2, {}, SMALL, "page_size: got 16; supported: multiples of 256 .*Set cache.page_size to 256"),
        (FA2, {"cache_dtype": torch.float8_e4m3fn}, LARGE, "cache_dtype: got float8_e4m3fn; supported: bfloat16"),
        (FA2, {"cache_dtype": torch.float16}, LARGE, "cache_dtype: got float16; supported: bfloat16"),
        (FA2, {"alibi_slopes": SLOPES, "causal": False}, LARGE, "alibi: got alibi_slopes with causal=False"),
        (FA2, {"chunk_size": 64}, LARGE, "chunks: got chunk_size=64"),
        (FA3, {"alibi_slopes": SLOPES}, SMALL, "alibi: got alibi_slopes"),
        (FA3, {}, KVCacheSpec(64, 24), "page_size: got 24; supported: 16, 32, 48 .*Set cache.page_size"),
        (FA3, {}, LARGE, "page_size: got 256; supported: 16, 32, 48 .*NaN behind a row's end"),
        (FA3, {"cache_dtype": torch.float8_e5m2}, SMALL, "cache_dtype: got float8_e5m2"),
        (FA3, {"dtype": torch.float16, "cache_dtype": torch.float8_e4m3fn}, SMALL, "float8_e4m3fn with bfloat16"),
        (FA3, {"head_dim_vo": 32}, SMALL, "unequal_head_dims"),
        (FA3, {"scale": -0.1}, SMALL, "any_scale: got scale=-0.1; supported: scales above 0"),
        (FA2, {"scale": 0.0}, LARGE, "any_scale: got scale=0; supported: scales above 0"),
        (FA3, {"head_dim": 96, "head_dim_vo": 96}, SMALL, "head_dim: got 96; supported: 64, 128, 192, 256 .*illegal"),
        (FA4, {"alibi_slopes": SLOPES}, SMALL, "alibi: got alibi_slopes"),
        (FA4, {"cache_dtype": torch.float8_e4m3fn}, SMALL, "cache_dtype: got float8_e4m3fn; supported: bfloat16"),
        (FA4, {}, KVCacheSpec(64, 128), "page_size: got 128; supported: 1, 2, 4, 8, 16, .*NaN behind a row's end"),
        (FA4, {"head_dim": 96, "head_dim_vo": 96}, SMALL, "head_dim: got 96; supported: 64, 128, 192, 256"),
        (FA4, {"chunk_size": 64}, SMALL, "chunks: got chunk_size=64"),
    ],
)
def test_layers_that_cannot_be_served(name: str, changes: dict[str, Any], cache: KVCacheSpec, told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        select_backend(name, [replace(SPEC, **changes)], cache, "cpu")


def test_the_table_is_that_of_all_providers() -> None:
    can = FlashAttnBackend.capabilities()
    assert (can.alibi, can.page_size_multiple, can.min_compute_capability) == (True, 1, (8, 0))
    assert torch.float8_e4m3fn in can.cache_dtypes


# Steps.


def test_calls_of_a_mixed_batch() -> None:
    """FlashAttention 2 attends decodes apart, as it splits keys for them alone; one call of 3 or 4 serves both."""
    for name, expected in ((FA2, [(2, 1), (2, 5)]), (FA3, [(4, 5)]), (FA4, [(4, 5)])):
        layer, batch = layer_and_batch(name, 32, 40, 48, 56, query_lens=(1, 1, 5, 5))
        calls = layer.begin(batch).calls
        assert [(call.rows.num_rows, call.rows.max_query_len) for call in calls] == expected
        assert all((call.schedule is not None) == (name == FA3) for call in calls)


@pytest.mark.parametrize("query_lens", [(1, 1), (5, 5)])
def test_no_call_is_made_for_no_rows(query_lens: tuple[int, ...]) -> None:
    """FlashAttention refuses a batch of none."""
    layer, batch = layer_and_batch(FA2, 32, 40, query_lens=query_lens)
    assert [call.rows.num_rows for call in layer.begin(batch).calls] == [2]


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)
def test_kernels_that_size_by_the_page_table_get_it_as_wide_as_needed(provider: Any) -> None:
    """In those how many parts keys are split into follows from it. The others get it as it is."""
    layer, batch = layer_and_batch(f"FLASH_ATTN_{provider.name.upper()}_EMULATED", 300, 40)
    common = batch.common()
    wide = replace(common, page_table=torch.nn.functional.pad(common.page_table, (0, 7)))
    (call,) = layer.state.begin_forward(layer.builder.build(0, wide)).calls
    lacking = wide.page_table.shape[1] - call.rows.page_table.shape[1]
    assert lacking == (7 if provider.name in ("flash_attn", "flash_attn_interface") else 0)


def test_a_fast_build_makes_no_schedule() -> None:
    layer, batch = layer_and_batch(FA3, 32, 40)
    step = layer.state.begin_forward(layer.builder.build(0, batch.common(), fast_build=True))
    assert step.calls[0].schedule is None


def test_unsplit_keys_give_the_same() -> None:
    for name in (FA2, FA3, FA4, "FLASH_ATTN_FLASH_ATTN_INTERFACE_EMULATED", "FLASH_ATTN_VLLM_FA2_EMULATED"):
        layer, batch = layer_and_batch(name, 300, 40, 48, query_lens=(1, 1, 5))
        layer.state.options = FlashAttnOptions(split_keys=False)
        step = layer.begin(batch)
        assert not step.calls[0].split_keys
        assert_matches(layer.forward(batch, step), batch, f"{name} without splits")


def test_a_schedule_is_for_its_lengths_alone() -> None:
    """What the emulated kernels do with an old schedule, so that a graph without a new one would show."""
    layer, batch = layer_and_batch(FA3, 300, 40)
    step = layer.begin(batch)
    call = step.calls[0]
    for schedule, is_written in ((call.schedule, True), (torch.zeros_like(call.schedule), False)):
        changed = replace(step, calls=(call._replace(schedule=schedule),))
        output = torch.full_like(batch.query, torch.nan)
        layer.impl.forward(batch.query, batch.key, batch.value, batch.fresh_pool(), changed, output)
        assert bool(output.isfinite().all()) == is_written


def test_sinks_go_to_kernels_that_hold_them_exactly() -> None:
    exact, rounded = torch.tensor([0.5, 1.0, -2.0, 3.0]), torch.tensor([0.1, 1.0, -2.0, 3.0])
    layer, batch = layer_and_batch(FA3, 20, 33, sinks=True)
    impl = get_backend(FA3).get_impl_cls()
    for sinks, given in ((exact, True), (rounded, False)):
        made = impl(batch.spec, batch.cache, "cpu", sinks=sinks)
        assert (made.constants[True].sinks is not None) == given
        layer.impl = made
        changed = replace(batch, sinks=sinks)
        for want_lse in (False, True):
            assert_matches(layer.forward(changed, layer.begin(changed), want_lse=want_lse), changed, f"{sinks}")


@pytest.mark.parametrize("name", [FA3, FA4])
def test_more_heads_than_some_kernels_take_sinks_for(name: str) -> None:
    """Those of FlashAttention 4 take them for any."""
    layer, batch = layer_and_batch(name, 20, 33, sinks=True, num_qo_heads=128)
    sinks = torch.zeros(128)
    layer.impl = get_backend(name).get_impl_cls()(batch.spec, batch.cache, "cpu", sinks=sinks)
    changed = replace(batch, sinks=sinks)
    assert_matches(layer.forward(changed, layer.begin(changed)), changed, "128 heads with sinks")


@pytest.mark.parametrize("name", [FA3, FA4])
def test_a_row_without_keys_has_no_lse_of_sinks_that_kernels_take(name: str) -> None:
    changes = {"attention_type": AttentionType.CROSS, "causal": False, "sinks": True}
    layer, batch = layer_and_batch(name, 0, 33, query_lens=(2, 3), **changes)
    changed = replace(batch, sinks=torch.tensor([0.5, 1.0, -2.0, 3.0]))
    layer.impl = get_backend(name).get_impl_cls()(batch.spec, batch.cache, "cpu", sinks=changed.sinks)
    assert layer.impl.constants[True].sinks is not None
    result = layer.forward(changed, layer.begin(changed), want_lse=True)
    assert_matches(result, changed, "a row without keys")
    assert bool(result.lse[:2].isneginf().all())


@pytest.mark.parametrize("which", ["query", "output"])
def test_tensors_whose_head_dim_is_not_contiguous(which: str) -> None:
    layer, batch = layer_and_batch(FA3, 20, 33)
    turned = batch.query.transpose(1, 2).contiguous().transpose(1, 2)
    query, output = (turned, None) if which == "query" else (batch.query, torch.empty_like(turned))
    with pytest.raises(ValueError, match=rf"{which} has strides .*pass {which}.contiguous"):
        layer.impl.forward(query, batch.key, batch.value, batch.fresh_pool(), layer.begin(batch), output)


def test_an_output_with_strides_is_written_in_place() -> None:
    for name in (FA2, FA3, FA4):
        layer, batch = layer_and_batch(name, 20, 33, 50, query_lens=(1, 1, 7))
        wide = torch.full((len(batch.query), 8, batch.spec.head_dim), torch.nan, dtype=torch.bfloat16)
        output = wide[:, ::2]
        layer.impl.forward(batch.query, batch.key, batch.value, batch.fresh_pool(), layer.begin(batch), output)
        assert_matches(Result(output, None, None), batch, f"{name}, every second head")
        assert bool(wide[:, 1::2].isnan().all())


def test_steps_of_others_are_refused() -> None:
    layer, batch = layer_and_batch(FA3, 20, 33)
    step = layer.begin(batch)
    given = (batch.query, batch.key, batch.value, batch.fresh_pool())
    with pytest.raises(TypeError, match="FlashAttnStep, and got a AttentionStep of FlashAttnMetadata"):
        layer.impl.forward(*given, AttentionStep(step.metadata))
    other, _ = layer_and_batch(FA3, 20, 33, scale=0.5)
    with pytest.raises(ValueError, match="differ from this one in scale"):
        other.impl.forward(*given, step)
    with pytest.raises(ValueError, match="query has shape"):
        layer.impl.forward(batch.query[:1], *given[1:], step)
    with pytest.raises(ValueError, match="their cache was not given: pass kv_cache"):
        layer.impl.forward(*given[:3], None, step)


def test_graphs_need_cached_keys() -> None:
    layer, batch = layer_and_batch(FA3, 20, attention_type=AttentionType.CROSS, causal=False)
    with pytest.raises(ValueError, match="attention over cached keys"):
        layer.builder.build_for_cudagraph_capture(batch.common())


def test_a_cascade_is_two_passes_over_the_decodes() -> None:
    kit = type("Kit", (KitBase,), {"backend_name": FA3})()
    shape = BatchShape(seq_lens=(40, 50, 60), query_lens=(1, 1, 4))
    batch = kit.make_batch(kit.make_spec(), shape, shared_prefix_len=32)
    layer = make_layer(kit.backend, batch)
    step: FlashAttnStep = layer.begin(batch, 32)
    assert step.prefix is not None
    assert [call.rows.seq_lens.tolist() for call in step.calls] == [[8, 18], [60]]
    assert step.prefix.rows.query_start_loc.tolist() == [0, 2]
    assert_matches(layer.forward(batch, step, want_lse=True), batch, "cascade")


@pytest.mark.parametrize("sinks", [(4.0, 3.0, 3.5, 4.5), (4.01, 3.01, 3.51, 4.51)], ids=["in kernels", "behind them"])
def test_sinks_count_once_in_a_cascade(sinks: tuple[float, ...]) -> None:
    kit = type("Kit", (KitBase,), {"backend_name": FA3})()
    shape = BatchShape(seq_lens=(40, 50, 60), query_lens=(1, 1, 1))
    batch = replace(kit.make_batch(kit.make_spec(sinks=True), shape, shared_prefix_len=32), sinks=torch.tensor(sinks))
    layer = make_layer(kit.backend, batch)
    step = layer.begin(batch, 32)
    assert step.prefix is not None
    assert_matches(layer.forward(batch, step, want_lse=True), batch, "sinks in a cascade")


def test_a_schedule_of_another_size_is_not_taken_for_the_captured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, batch = layer_and_batch(FA3, 32, 40)
    with layer.state.graph_capture(2):
        clone = layer.state.graph_clone(2)
    longer = layer.state.schedule
    monkeypatch.setattr(layer.state, "schedule", lambda *given: torch.cat([longer(*given)] * 2))
    with pytest.raises(RuntimeError, match=r"its version changed what a schedule's size follows from"):
        clone.begin_forward(layer.builder.build(0, replace(batch.common(), for_graph=True)))


@pytest.mark.parametrize("name", [FA3, "FLASHINFER_EMULATED"])
def test_what_sinks_leave_is_rounded_once(name: str) -> None:
    """Behind a kernel whose output is in bfloat16, the factor is not rounded to that as well."""
    spec = replace(SPEC, sinks=True, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    batch = random_batch(get_backend(name), spec, [40] * 64, [1] * 64)
    layer = make_layer(get_backend(name), batch)
    lse, output = torch.randn(64, spec.num_qo_heads), torch.randn(64, spec.num_qo_heads, spec.head_dim_vo).bfloat16()
    factor = torch.sigmoid(lse.double() - batch.sinks.double())[..., None]
    got = output.clone()
    if name == FA3:
        add_sinks(got, lse, layer.impl.sinks)
    else:
        layer.impl._finish(got, lse / math.log(2), layer.begin(batch).metadata, want_lse=False)
    assert float((got == (output * factor).bfloat16()).float().mean()) > 0.99


@pytest.mark.parametrize("wider", [67, 72, 128])
@pytest.mark.parametrize("name", ["FLASH_ATTN_FLASH_ATTN_4_EMULATED", "FLASH_ATTN_VLLM_FA3_EMULATED"])
def test_outputs_whose_rows_are_not_aligned(name: str, wider: int) -> None:
    """FlashAttention 4 stores 16 bytes at once, and asks for outputs that lie so: others come back by a copy."""
    batch = random_batch(get_backend(name), SPEC, [40, 17, 30], [1, 1, 9])
    layer, around = make_layer(get_backend(name), batch), batch.query.new_full((11, 4, wider + 1), math.nan)
    for first in (0, 1):
        output = around[..., first : first + 64]
        layer.impl.forward(batch.query, batch.key, batch.value, batch.fresh_pool(), layer.begin(batch), output)
        assert_matches(Result(output, None, None), batch, f"rows of {wider + 1}, from {first} on")
        assert bool(output.fill_(math.nan).isnan().all() and around.isnan().all())
