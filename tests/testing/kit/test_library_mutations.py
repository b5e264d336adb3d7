"""The kit finds what it should in backends over libraries: each broken in a seam that only such backends have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attn_backends.backends.flash_attn.built import narrowed
from attn_backends.backends.flash_attn.impl import FlashAttnImpl
from attn_backends.backends.flashinfer.impl import FlashInferImpl
from attn_backends.backends.flashinfer.plans import Plan
from attn_backends.cache.kv_cache import write_kv
from attn_backends.registry import get_backend
from attn_backends.testing.cases.features import CROSS, feature
from attn_backends.testing.conformance import BackendConformance
from tests.backends.flash_attn import test_built  # noqa: F401 (register)
from tests.backends.flashinfer.test_state import AnyLevel

F16 = torch.float16
FLASH_ATTN = "FLASH_ATTN_VLLM_FA3_EMULATED"
CUT = "FLASH_ATTN_CUT_EMULATED"  # without kernels of 96
FLASHINFER = "FLASHINFER_EMULATED"


def unscaled_keys(layer: FlashAttnImpl) -> None:
    layer.constants = dict.fromkeys((False, True), layer.constants[False])


def unscaled_keys_behind(layer: FlashAttnImpl) -> None:
    """Of layers whose sinks join behind the kernel."""
    layer.constants_behind = dict.fromkeys((False, True), layer.constants_behind[False])


def unscaled_prefix(layer: FlashAttnImpl) -> None:
    layer.prefix_constants = replace(layer.prefix_constants, scale=layer.spec.scale)


def unscaled_values(layer: FlashAttnImpl) -> None:
    layer.value_scales = {False: 1.0, True: 1.0}


def scaled_new_keys(layer: FlashAttnImpl) -> None:
    layer.constants = dict.fromkeys((False, True), layer.constants[True])


def scaled_new_values(layer: FlashAttnImpl) -> None:
    layer.value_scales = dict.fromkeys((False, True), layer.v_scale)


def scaled_twice(layer: FlashAttnImpl) -> None:
    """As if a kernel over an fp8 cache took no scale of values."""
    layer.value_scales = {False: 1.0, True: layer.v_scale}


def flash_attn(change: Callable[[FlashAttnImpl], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """FLASH_ATTN whose layers are changed once they are made."""
    made = FlashAttnImpl.__init__

    def init(self: FlashAttnImpl, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        change(self)

    return lambda patch: patch.setattr(FlashAttnImpl, "__init__", init)


def without_scale(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """FLASHINFER's kernels are not told one of the scales."""
    run = Plan.run

    def changed(self: Plan, query: Any, given: Any, output: Any, lse: Any, scales: dict[str, float]) -> None:
        run(self, query, given, output, lse, {key: scale for key, scale in scales.items() if key != name})

    return lambda patch: patch.setattr(Plan, "run", changed)


def unscaled_write(which: str) -> Callable[[pytest.MonkeyPatch], None]:
    def changed(key: Any, value: Any, kv_cache: Any, slots: Any, k_scale: float, v_scale: float) -> None:
        write_kv(key, value, kv_cache, slots, *((1.0, v_scale) if which == "k" else (k_scale, 1.0)))

    return lambda patch: patch.setattr("attn_backends.interface.impl.write_kv", changed)


def by_threshold(patch: pytest.MonkeyPatch) -> None:
    """FLASHINFER takes a low LSE for that of a row without keys."""
    finish = FlashInferImpl._finish

    def changed(self: FlashInferImpl, output: Any, lse: torch.Tensor, metadata: Any, want_lse: bool) -> None:
        lse.masked_fill_(lse <= -4.9e4, -math.inf)
        finish(self, output, lse, metadata, want_lse)

    patch.setattr(FlashInferImpl, "_finish", changed)


def idle_rows_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlashInferImpl, "_empty_idle_rows", staticmethod(lambda lse, rows, is_uniform: None))


def idle_rows_of_one_token(patch: pytest.MonkeyPatch) -> None:
    """Rows without keys are told, and their tokens are taken for one each."""

    def changed(lse: torch.Tensor, rows: Any, is_uniform: bool) -> None:
        if rows.some_may_lack_keys:
            lse[: rows.num_rows].masked_fill_((rows.kv_indptr.diff() == 0)[:, None], -math.inf)

    patch.setattr(FlashInferImpl, "_empty_idle_rows", staticmethod(changed))


def declares_what_was_not_built(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("attn_backends.backends.flash_attn.provider.narrowed", lambda can, *others: can)


def rounds_no_head_dim_up(patch: pytest.MonkeyPatch) -> None:
    """A layer of 80 is taken to have a kernel of its own, where that of 96 runs it."""
    patch.setattr(
        "attn_backends.backends.flash_attn.provider.narrowed",
        lambda can, kernels, kernel_dim: replace(
            narrowed(can, kernels, kernel_dim), head_dims=narrowed(can, kernels, kernel_dim).head_dims | {80}
        ),
    )


@dataclass(frozen=True)
class Mutation:
    name: str
    backend: str
    change: Callable[[pytest.MonkeyPatch], None]
    case: Callable[[Any], object]  # takes a BackendConformance


def scales(name: str) -> Callable[[Any], object]:
    return lambda kit: kit.test_scales_over_float_caches(name)


MUTATIONS = [
    Mutation("FA: k_scale not read", FLASH_ATTN, flash_attn(unscaled_keys), scales("plain")),
    Mutation("FA: k_scale not read with sinks", FLASH_ATTN, flash_attn(unscaled_keys_behind), scales("gpt_oss")),
    Mutation(
        "FA: k_scale not read of a prefix",
        FLASH_ATTN,
        flash_attn(unscaled_prefix),
        lambda k: k.test_scales_with_a_shared_prefix("plain"),
    ),
    Mutation("FA: v_scale not read", FLASH_ATTN, flash_attn(unscaled_values), scales("soft_cap")),
    Mutation(
        "FA: v_scale not read in graphs",
        FLASH_ATTN,
        flash_attn(unscaled_values),
        lambda k: k.test_replays_with_scales("sinks"),
    ),
    Mutation(
        "FA: k_scale of new keys",
        FLASH_ATTN,
        flash_attn(scaled_new_keys),
        lambda k: k.test_scales_are_of_the_cache_alone(feature("plain")),
    ),
    Mutation(
        "FA: v_scale of new values",
        FLASH_ATTN,
        flash_attn(scaled_new_values),
        lambda k: k.test_scales_are_of_the_cache_alone(feature("sinks")),
    ),
    Mutation("FA: k_scale not written", FLASH_ATTN, unscaled_write("k"), scales("window_1")),
    Mutation("FA: v_scale not written", FLASH_ATTN, unscaled_write("v"), scales("cross")),
    Mutation(
        "FA: what was not built is declared", CUT, declares_what_was_not_built, lambda k: k.test_head_dims(96, F16)
    ),
    Mutation("FA: a head dim is not rounded up", CUT, rounds_no_head_dim_up, lambda k: k.test_head_dims(80, F16)),
    Mutation("FI: k_scale not read", FLASHINFER, without_scale("k_scale"), scales("gemma2")),
    Mutation("FI: v_scale not read", FLASHINFER, without_scale("v_scale"), scales("plain")),
    Mutation("FI: k_scale not written", FLASHINFER, unscaled_write("k"), scales("plain")),
    Mutation("FI: v_scale not written", FLASHINFER, unscaled_write("v"), scales("sinks")),
    Mutation(
        "FI: a low LSE is that of no keys",
        FLASHINFER,
        by_threshold,
        lambda k: k.test_logits_far_from_zero(feature("sinks"), 8.0),
    ),
    Mutation(
        "FI: a low LSE is that of no keys, in graphs",
        FLASHINFER,
        by_threshold,
        lambda k: k.test_replays_of_logits_far_from_zero(),
    ),
    Mutation("FI: rows without keys keep the kernel's LSE", FLASHINFER, idle_rows_kept, lambda k: k.test_cross(F16)),
    Mutation(
        "FI: rows without keys have one token",
        FLASHINFER,
        idle_rows_of_one_token,
        lambda k: k.test_logits_far_from_zero(CROSS, 8.0),
    ),
]


def kit(name: str) -> BackendConformance:
    base = AnyLevel if name == FLASHINFER else BackendConformance
    return type("Kit", (base,), {"backend_name": name, "backend": get_backend(name), "dtypes": (F16,)})()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_fails_on(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.case(kit(mutation.backend))
    mutation.change(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        mutation.case(kit(mutation.backend))


def test_a_scale_that_an_fp8_kernel_takes_is_not_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> None:
        made = type("Kit", (BackendConformance,), {"backend_name": FLASH_ATTN, "dtypes": (torch.bfloat16,)})()
        made.test_cache_dtypes(torch.float8_e4m3fn, "NHD", torch.bfloat16)

    case()
    flash_attn(scaled_twice)(monkeypatch)
    with pytest.raises(AssertionError):
        case()
