"""What the kernel under SDPA is given: it reads 16 bytes at a time, and what is called here does not check that."""

from __future__ import annotations

import pytest
import torch

from attn_backends.backends.mla.attend import attend, in_whole_words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "first", "dim"), [(32, 0, 32), (28, 16, 12), (24, 4, 16), (40, 8, 32), (36, 0, 32)])
def test_rows_are_whole_words(width: int, first: int, dim: int, dtype: torch.dtype) -> None:
    """Values cut out of rows of keys and values, as the expanding product makes them."""
    given = torch.randn(2, 5, 3, width).to(dtype).transpose(1, 2)[..., first : first + dim]
    got = in_whole_words(given)
    word = 16 // dtype.itemsize
    assert got.shape == (*given.shape[:-1], -(-dim // word) * word)
    assert all(stride % word == 0 for stride in got.stride()[:-1])
    assert got.storage_offset() % word == 0
    assert got.stride(-1) == 1
    assert got[..., :dim].equal(given)
    assert not got[..., dim:].any()


def test_what_is_so_already_is_not_copied() -> None:
    given = torch.randn(2, 3, 5, 64, dtype=torch.bfloat16)[..., 16:48]
    assert in_whole_words(given) is given


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_keys_that_a_query_may_not_see_stay_hidden_at_any_scale(scale: float) -> None:
    query, key, value = (torch.randn(1, 2, 5, dim, dtype=torch.float64) for dim in (12, 12, 8))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    logits = (query @ key.mT * scale).masked_fill(hidden, float("-inf"))
    out, lse = attend(query, key, value, scale, is_causal=True)
    torch.testing.assert_close(out, logits.softmax(-1) @ value)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
