"""What a launch passes is what a kernel takes: named tuples' fields in the order of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, MLASpec, plan_groups

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
variants = pytest.importorskip("attn_backends.kernels.variants")
arguments = pytest.importorskip("attn_backends.backends.triton.kernels.arguments")
triton_launch = pytest.importorskip("attn_backends.backends.triton.launch")
prefill_launch = pytest.importorskip("attn_backends.kernels.prefill.launch")
hopper_launch = pytest.importorskip("attn_backends.kernels.prefill.hopper_launch")
split_launch = pytest.importorskip("attn_backends.kernels.prefill.split_launch")
triton_mla = pytest.importorskip("attn_backends.backends.mla.triton_mla.launch")
TritonMLAState = pytest.importorskip("attn_backends.backends.mla.triton_mla.state").TritonMLAState
cache_kernels = pytest.importorskip("attn_backends.cache.kernels")
fused = pytest.importorskip("attn_backends.engine.models.fused.kernels")
cut_list = pytest.importorskip("attn_backends.kernels.cut_list")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="lists launches, which interpreted kernels make")

GPUS = (launching.Machine(132, 227 << 10, True, True, True), launching.Machine(108, 163 << 10, False, False, False))
CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
LAUNCHED = {  # by `launch`, which takes named tuples
    "decode_kernel", "prefill_kernel", "prefill_hopper_kernel", "mla_decode_kernel", "mla_hopper_kernel",
    "mla_combine_kernel", "write_kv_kernel", "quantise_kernel", "rms_norm_kernel", "rotate_kernel", "gate_kernel",
    "one_token_kernel", "list_kernel", "join_kernel", "cut_kernel",
}  # fmt: skip
STARTED = {  # by `start_kernel`, with these
    triton_launch.upcast_kernel: (arguments.UpcastTensors, arguments.UpcastVarying, arguments.CacheStrides,
                                  arguments.UpcastConstants),
}  # fmt: skip


def names(groups: Iterable[Any]) -> list[str]:
    return [field for group in groups for field in getattr(group, "_fields", group)]


def launch_all() -> None:
    from attn_backends.backends.triton.state import TritonState
    from attn_backends.cache.warm_up import list_quantised_queries
    from attn_backends.kernels.examples import empty

    cache, limits = KVCacheSpec(64, 64), Limits(4, 64, 4096)
    spec = AttentionSpec(8, 2, 128, dtype=BF16)
    narrow = AttentionSpec(8, 2, 128, dtype=BF16, cache_dtype=FP8)
    capped = AttentionSpec(8, 2, 80, dtype=BF16, logits_soft_cap=30.0)
    for each in (spec, narrow, capped):
        TritonState(plan_groups({0: each}), cache, limits, CPU).variants()
    for latent in (MLASpec(128, dtype=BF16), MLASpec(128, dtype=BF16, cache_dtype=FP8), MLASpec(4, dtype=BF16)):
        TritonMLAState(plan_groups({0: latent}), cache, limits, CPU).list_launches()
    list_quantised_queries([narrow])
    token, angles = empty(1, 64, dtype=BF16), empty(1, 16, dtype=BF16)
    fused.rms_norm(token, token[0], 1e-6)
    fused.rotate_(empty(1, 4, 16, dtype=BF16), 2, angles, angles)
    fused.gated(token)
    fused.one_token_linear(token, empty(32, 64, dtype=BF16))


def test_the_fields_of_a_launch_are_its_kernels_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[tuple[tuple[str, ...], tuple[str, ...]]]] = {}

    def noting(launch: Callable[..., None]) -> Callable[..., None]:
        def note(kernel: Any, grid: Any, tensors: Any, varying: Any, groups: Any, *rest: Any, **options: Any) -> None:
            fixed = groups.groups if isinstance(groups, launching.Fixed) else groups
            passed = names((options.get("descriptors", ()), tensors, varying, *fixed))
            found.setdefault(kernel.__name__, set()).add((tuple(passed), tuple(kernel.arg_names)))
            launch(kernel, grid, tensors, varying, groups, *rest, **options)

        return note

    for module in (triton_launch, prefill_launch, hopper_launch, split_launch, triton_mla, cache_kernels, fused,
                   cut_list):  # fmt: skip
        monkeypatch.setattr(module, "launch", noting(module.launch))
    for machine in GPUS:
        with variants.listing(machine):
            launch_all()
    assert set(found) == LAUNCHED
    for kernel, ways in found.items():
        for passed, taken in ways:
            assert passed == taken, kernel
    for kernel, groups in STARTED.items():
        assert names(groups) == kernel.arg_names, kernel.__name__
