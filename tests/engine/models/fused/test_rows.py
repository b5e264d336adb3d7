"""A layer's small operations in C against float64, over rows that lie in larger tensors."""

from __future__ import annotations

import logging
from random import Random

import pytest
import torch

from attn_backends.engine.models.fused import rows
from attn_backends.engine.models.fused.cpu import _Rotation
from attn_backends.engine.models.fused.rows import RowKernels, row_kernels

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # and what rounding once may be off by


def kernels(dtype: torch.dtype) -> RowKernels:
    found = row_kernels(dtype)
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def drawn(numbers: Random, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(numbers.getrandbits(32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_norms(dtype: torch.dtype, seed: int) -> None:
    """Of any size, of one row to more than one thread's; a row of zeros stays one, and NaN stays in its row."""
    numbers = Random(seed)
    num_rows, size = numbers.choice([0, 1, 3, 200]), numbers.choice([1, 16, 31, 576, 1000])
    whole = (drawn(numbers, num_rows, size + 5) * 10 ** numbers.uniform(-2, 2)).to(dtype)
    hidden, weight, epsilon = whole[:, :size], drawn(numbers, size), 1e-5
    if num_rows > 2:
        hidden[0], hidden[1, 0] = 0, torch.nan
    got = kernels(dtype).rms_norm(hidden, weight, epsilon)
    wide = hidden.double()
    expected = wide * weight.double() / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, rtol=DTYPES[dtype], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_rotations(dtype: torch.dtype, seed: int) -> None:
    """In place, of the first heads of each token; all others keep what they have."""
    numbers = Random(seed)
    num_tokens, head_dim = numbers.choice([0, 1, 5, 300]), 2 * numbers.randint(1, 70)
    num_heads, others = numbers.randint(1, 12), numbers.randint(0, 4)
    heads = drawn(numbers, num_tokens, num_heads + others, head_dim).to(dtype)
    cos, sin = (drawn(numbers, num_tokens, head_dim).to(dtype) for _ in range(2))
    before = heads.double()
    kernels(dtype).rotate(heads[:, :num_heads], cos, sin)
    turned = torch.cat((-before[..., head_dim // 2 :], before[..., : head_dim // 2]), -1)
    expected = before * cos.double()[:, None] + turned * sin.double()[:, None]
    limit = DTYPES[dtype] * (before.abs() * cos.double()[:, None].abs() + turned.abs() * sin.double()[:, None].abs())
    assert bool(((heads - expected).abs() <= limit + 1e-6)[:, :num_heads].all())
    assert torch.equal(heads[:, num_heads:].double(), before[:, num_heads:])


def test_angles_of_another_shape_are_refused() -> None:
    heads, angles = torch.ones(3, 2, 8), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"give a row of 8 for each of 3 tokens"):
        kernels(torch.float32).rotate(heads, angles, angles)


def test_both_ways_agree_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    heads = torch.randn(5, 4, 16)
    angles = (torch.randn(1, 5, 16), torch.randn(1, 5, 16))
    with_c = _Rotation()(heads.clone(), angles)
    monkeypatch.setenv("CC", "no-such-compiler")
    row_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger=rows.__name__):
            torch.testing.assert_close(_Rotation()(heads, angles), with_c)
        assert "cannot be compiled" in caplog.text
    finally:
        row_kernels.cache_clear()
