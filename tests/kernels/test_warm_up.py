"""Kernels of ours beside the backends' libraries: what is listed for them, and that traffic asks for no others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from attn_backends.backends.flashinfer import metadata
from attn_backends.cache.warm_up import list_cache_writes
from attn_backends.kernels import warm_up
from attn_backends.spec import AttentionSpec, KVCacheSpec

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
examples = pytest.importorskip("attn_backends.kernels.examples")
variants = pytest.importorskip("attn_backends.kernels.variants")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")

H200 = launching.Machine(132, 227 << 10, True, True, True)
SPEC = AttentionSpec(32, 8, 128, dtype=torch.bfloat16)


def keys(launch: Callable[[], object]) -> set[Any]:
    with variants.listing(H200) as found:
        launch()
    return set(found.variants)


def test_pages_left_out_of_any_table() -> None:
    from attn_backends.backends.flashinfer.csr_kernel import csr_of

    listed, numbers = keys(lambda: metadata.list_prefix_pages(200, 16)), Random(0)
    for _ in range(200):
        num_rows, width = numbers.randint(1, 200), numbers.randint(1, 99)
        table, lens = torch.zeros(num_rows, width, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32)
        assert keys(lambda: csr_of(table, lens, 16, numbers.randint(0, 999), lens)) <= listed  # noqa: B023


def test_parts_joined_for_any_number_of_tokens() -> None:
    """LSEs lie token by token, or head by head, as libraries give them."""
    from attn_backends.kernels.merge_state_triton import merge

    listed, numbers = keys(lambda: warm_up.list_merges([SPEC])), Random(0)
    for _ in range(200):
        tokens, first = numbers.randint(1, 700), numbers.randint(0, 9)
        lse = torch.zeros(32, tokens).T if numbers.random() < 0.5 else torch.zeros(tokens + first, 32)[first:]
        out = examples.empty(tokens + first, 32, 128, dtype=torch.bfloat16)[first:]
        assert keys(lambda: merge(out, lse, torch.empty_like(out), torch.zeros_like(lse))) <= listed  # noqa: B023


def test_pages_copied_in_caches_of_any_layout() -> None:
    """However many, of however many layers."""
    from attn_backends.cache.kernels import launch_copy_pages

    listed, numbers = keys(lambda: list_cache_writes([SPEC], KVCacheSpec(64, 16))), Random(0)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for _ in range(20):
            tensor = examples.empty(numbers.randint(9, 99), 16, numbers.randint(1, 9), 128, dtype=dtype)
            pairs = [(i, i + 4) for i in range(numbers.randint(1, 4))]
            assert keys(lambda: launch_copy_pages([tensor] * numbers.randint(1, 80), pairs)) <= listed  # noqa: B023


@pytest.mark.parametrize("hidden", [576, 2048, 4096])
def test_layers_are_compared_at_every_form_of_their_kernels(hidden: int) -> None:
    """At one token and at seven (see `fuse_cuda_layers`): with any other number nothing more is compiled."""
    from attn_backends.engine.models.fused.kernels import gated, rms_norm, rotate_

    def layer(num_tokens: int) -> None:
        tokens = examples.empty(num_tokens, hidden, dtype=torch.bfloat16)
        rms_norm(tokens, tokens[0], 1e-6)
        angles = examples.empty(num_tokens, 64, dtype=torch.bfloat16)
        rotate_(examples.empty(num_tokens, 12, 64, dtype=torch.bfloat16), 9, angles, angles)
        gated(examples.empty(num_tokens, 4 * hidden, dtype=torch.bfloat16))

    compared = keys(lambda: layer(1)) | keys(lambda: layer(7))
    assert len(compared) == 6
    for num_tokens in (2, 3, 16, 64, 8192):
        assert keys(lambda: layer(num_tokens)) <= compared  # noqa: B023


def test_nothing_is_compiled_on_a_cpu() -> None:
    warm_up.compile_listed(torch.device("cpu"), lambda: pytest.fail("it was listed"), None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TORCH", set()),
        ("FLASH_ATTN", {"merge_kernel"}),
        ("FLASHINFER", {"csr_kernel"}),
        (
            "TRITON",
            {"decode_kernel", "cut_kernel", "prefill_kernel", "prefill_hopper_kernel", "list_kernel", "join_kernel"},
        ),
    ],
)
def test_states_compile_what_they_list(name: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; for one layer's state, without its library."""
    from attn_backends.backends.flash_attn.state import FlashAttnState
    from attn_backends.backends.flashinfer.state import FlashInferState
    from attn_backends.backends.torch.state import TorchState
    from attn_backends.backends.triton import state as triton_state
    from attn_backends.spec import Limits, plan_groups

    states = (TorchState, FlashAttnState, FlashInferState, triton_state.TritonState)
    made: Any = object.__new__(next(state for state in states if state.backend_name == name))
    made.groups, made.cache, made.limits = plan_groups({0: SPEC}), KVCacheSpec(64), Limits(5, 64, 999)
    made._specs, made.options, made.device, made.choices = {0: SPEC}, None, torch.device("cuda"), {}
    compiled: list[Any] = []
    for module in (variants, triton_state):
        monkeypatch.setattr(module, "compile_variants", lambda found, device, progress: compiled.extend(found))
        monkeypatch.setattr(launching, "machine_of", lambda device: H200)
    monkeypatch.setattr(triton_state, "machine_of", lambda device: H200)
    monkeypatch.setattr(FlashInferState, "_choose_kernels", lambda *given: None)  # by the library
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **how: torch.empty(*size, device="meta", **how))
    made.warm_up()
    assert {variant.name for variant in compiled} == expected | {"write_kv_kernel", "copy_pages_kernel"}
