"""Batches of graphs of mixed rows, where a backend has graphs of equal rows alone: refused, by whoever gets them."""

from __future__ import annotations

import importlib

import pytest
import torch

from attn_backends import AttentionSpec, MLASpec, Unsupported, get_backend
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface import Plans
from attn_backends.spec import KVCacheSpec, Limits, plan_groups

LIMITS, CACHE = Limits(4, 16, 64), KVCacheSpec(8, 16)
PLAIN, LATENT = AttentionSpec(4, 2, 32), MLASpec(2)
BUILDERS = {
    "torch": ("TorchMetadataBuilder", PLAIN),
    "flash_attn": ("FlashAttnMetadataBuilder", PLAIN),
    "flashinfer": ("FlashInferMetadataBuilder", PLAIN),
    "mla": ("MLAMetadataBuilder", LATENT),
    "mla.torch_mla": ("TorchMLAMetadataBuilder", LATENT),
}


def mixed_batch(query_lens: list[int], num_tokens: int) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    lens, table = torch.tensor(query_lens, dtype=torch.int32) + 3, torch.zeros(len(query_lens), 4, dtype=torch.int32)
    slots = torch.full((num_tokens,), -1)
    return CommonAttentionMetadata.from_tensors(
        16, starts, starts, lens, None, table, slots, num_tokens=num_tokens, for_graph=True, is_mixed=True
    )


@pytest.mark.parametrize("query_lens", [[1, 3], [2, 2], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("folder", BUILDERS)
def test_builders_refuse_them(folder: str, query_lens: list[int]) -> None:
    """Rows that happen to be equal too: a replay may bring others."""
    name, spec = BUILDERS[folder]
    module = importlib.import_module(f"attn_backends.backends.{folder}.metadata")
    builder = getattr(module, name)(plan_groups({0: spec})[0], CACHE, LIMITS, "cpu")
    common = mixed_batch(query_lens, 4)
    assert not builder.can_run_in_cudagraph(common)
    with pytest.raises(ValueError, match="eager"):
        builder.build(0, common)


def test_plans_refuse_them() -> None:
    """Whatever the builder knows of them, as another party's may not."""
    plans = Plans(get_backend("TORCH"), {0: PLAIN}, CACHE, LIMITS, "cpu")
    plans.state.hold_graph_buffers(4)
    with pytest.raises(Unsupported, match="of mixed batches"):
        plans.plan(mixed_batch([1, 3], 4))
