"""Merging in one launch gives the same every time, for as many rows as keep all of a GPU busy."""

from __future__ import annotations

import pytest
import torch

from attn_backends.kernels.merge_state import merge_in_torch
from tests.helpers.interpreted import INTERPRETED, in_own_process, run_interpreted

HEADS = 10
SIZES = [  # device, tokens, times
    pytest.param(
        ("cpu", 21, 1),
        marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own"),
        id="cpu",
    ),
    pytest.param(("cuda", 2651, 50), marks=pytest.mark.gpu, id="cuda"),
]
DTYPES = [  # of the output and of what is merged into it, and how far they may be off
    (torch.float32, torch.float32, 1e-5),
    (torch.float32, torch.bfloat16, 1e-5),
    (torch.bfloat16, torch.bfloat16, 1e-2),
    (torch.float16, torch.float16, 2e-3),
]


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def parts(num_tokens: int, dim: int, dtypes: tuple[torch.dtype, torch.dtype], by_heads: bool) -> list[torch.Tensor]:
    """Two results, with LSEs token by token or head by head: some tokens saw no key in one of them, some in neither."""
    torch.manual_seed(dim)
    output, more = (torch.randn(num_tokens, HEADS, dim).to(dtype) for dtype in dtypes)
    shape = (HEADS, num_tokens) if by_heads else (num_tokens, HEADS)
    lse, more_lse = (torch.randn(shape) * 3 for _ in range(2))
    lse, more_lse = (each.T if by_heads else each for each in (lse, more_lse))
    lse[::7], more_lse[::5] = -torch.inf, -torch.inf
    output[::7], more[::5] = torch.nan, torch.nan
    return [output, lse, more, more_lse]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_heads", [False, True], ids=["by tokens", "by heads"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: f"{dtypes[1]} into {dtypes[0]}")
@pytest.mark.parametrize("dim", [12, 16, 64, 72, 128, 256, 512])
def test_merging_again_gives_the_same(
    dim: int, dtypes: tuple[torch.dtype, torch.dtype, float], by_heads: bool, size: tuple[str, int, int]
) -> None:
    """A warp that is late must not find the LSE that another has written."""
    merge = pytest.importorskip("attn_backends.kernels.merge_state_triton").merge
    (device, num_tokens, times), tolerance = size, dtypes[2]
    given = [each.to(device) for each in parts(num_tokens, dim, dtypes[:2], by_heads)]
    expected, first = [each.clone() for each in given[:2]], None
    merge_in_torch(*expected, *given[2:])
    for _ in range(times):
        got = [each.clone() for each in given[:2]]
        merge(*got, *given[2:])
        torch.testing.assert_close(got[0], expected[0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)
        first = first or got
        assert all(map(torch.equal, got, first))
