"""Decode rows in pieces give what they give together, in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.backends.torch.attend import join_pieces
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadataBuilder
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.backends.torch.state import TorchState
from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, plan_groups

HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 4, 2, 16, 24, 4
BYTES_PER_KEY = KV_HEADS * 2 * DIM * 4
TOGETHER = TorchOptions(native_decode=False)


def cut(keys: int) -> TorchOptions:
    return TorchOptions(native_decode=False, gather_together_bytes=0, piece_bytes=keys * BYTES_PER_KEY)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 11},
    "chunks": {"chunk_size": 8},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "fp8 cache": {"cache_dtype": torch.float8_e4m3fn},
}


def rows_of(lengths: tuple[int, ...]) -> list[SequenceGroup]:
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).view(len(lengths), -1).tolist()
    return [SequenceGroup(str(i), (SequenceData(n - 1, 1, pages[i]),)) for i, n in enumerate(lengths)]


def attended(
    lengths: tuple[int, ...], options: TorchOptions, prefix: int = 0, **layer: Any
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Output, LSE, and whether they came in pieces."""
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, dtype=torch.float32, **layer)
    cache, limits, group = KVCacheSpec(PAGES, PAGE_SIZE), Limits(8, 32, 96), plan_groups({0: spec})[0]
    sinks = torch.arange(HEADS) / 2 if spec.sinks else None
    impl = TorchImpl(spec, cache, "cpu", sinks=sinks, k_scale=0.5, v_scale=2.0, options=options)
    metadata = TorchMetadataBuilder(group, cache, limits, "cpu", options=options).build_from_groups(
        rows_of(lengths), 0, prefix
    )
    step = TorchState([group], cache, limits, "cpu", options=options).begin_forward(metadata)
    torch.manual_seed(0)
    kv = KVCache(*(torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM).to(spec.cache_dtype) for _ in range(2)))
    query, key, value = (torch.randn(len(lengths), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    lse = torch.empty(len(lengths), HEADS)
    output = impl.forward(query, key, value, kv, step, lse=lse)
    batch = metadata.decode_batch
    return output, lse, batch is not None and batch.owners is not None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keys", [1, 5, 16])  # of a piece
@pytest.mark.parametrize("lengths", [(16, 16, 16), (13, 31, 9), (1, 32, 7), (90,)])
@pytest.mark.parametrize("layer", LAYERS)
def test_pieces_give_what_rows_give(layer: str, lengths: tuple[int, ...], keys: int) -> None:
    whole, in_pieces = (attended(lengths, options, **LAYERS[layer]) for options in (TOGETHER, cut(keys)))
    torch.testing.assert_close(in_pieces[:2], whole[:2])
    assert in_pieces[2] or len(lengths) == 1


@pytest.mark.parametrize("piece_bytes", [1, BYTES_PER_KEY // 3, BYTES_PER_KEY - 1, BYTES_PER_KEY + 1])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_piece_holds_one_key_at_least(layer: str, piece_bytes: int) -> None:
    options = cut(1).model_copy(update={"piece_bytes": piece_bytes})
    whole, in_pieces = (attended((13, 31, 9), each, **LAYERS[layer]) for each in (TOGETHER, options))
    torch.testing.assert_close(in_pieces[:2], whole[:2])
    assert in_pieces[2]


def test_pieces_after_a_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.backends.torch.metadata.CASCADE_MIN_BYTES", 1)
    whole, in_pieces = (attended((13, 31, 9), options, prefix=8) for options in (TOGETHER, cut(5)))
    torch.testing.assert_close(in_pieces[:2], whole[:2])
    assert in_pieces[2]


def test_what_gives_no_lse_goes_row_by_row() -> None:
    assert not attended((13, 31, 9), cut(1), logits_soft_cap=2.0)[2]


@pytest.mark.parametrize("options", [TOGETHER, cut(9)], ids=["together", "pieces"])
def test_decodes_without_their_cache_are_refused(options: TorchOptions) -> None:
    """And not left without an output."""
    spec, cache, limits = AttentionSpec(HEADS, KV_HEADS, DIM), KVCacheSpec(PAGES, PAGE_SIZE), Limits(8, 32, 96)
    group = plan_groups({0: spec})[0]
    metadata = TorchMetadataBuilder(group, cache, limits, "cpu", options=options).build_from_groups(
        rows_of((40, 7)), 0, 0
    )
    step = TorchState([group], cache, limits, "cpu", options=options).begin_forward(metadata)
    query, key = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="pass kv_cache"):
        TorchImpl(spec, cache, "cpu", options=options).forward(query, key, key, None, step)


@pytest.mark.parametrize("level", [-300.0, 0.0, 300.0])
def test_pieces_of_logits_far_from_zero(level: float) -> None:
    """Two rows of three pieces and of one; float32 does not hold e to the power of their LSEs."""
    outs, lses = torch.randn(4, KV_HEADS, 2, DIM), torch.randn(4, KV_HEADS, 2) + level
    owners, weights = torch.tensor([0, 0, 1, 0]), (lses.double() - level).exp()
    sums, weighted = (torch.zeros(2, *each.shape[1:]).double() for each in (lses, outs))
    sums.index_add_(0, owners, weights)
    weighted.index_add_(0, owners, outs.double() * weights[..., None])
    joined = join_pieces(outs, lses.clone(), owners, (2, KV_HEADS, 2, DIM))
    torch.testing.assert_close(joined.output.double(), (weighted / sums[..., None]).flatten(1, 2), atol=1e-4, rtol=1e-4)
    assert joined.lse is not None
    torch.testing.assert_close(joined.lse.double(), (sums.log() + level).flatten(1, 2), atol=1e-4, rtol=1e-5)
