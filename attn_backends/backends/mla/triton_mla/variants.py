"""Every compiled form of a kernel that decode rows within the limits can ask TRITON_MLA for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from attn_backends.backends.mla.metadata import MLAMetadataBuilder
from attn_backends.backends.mla.triton_mla.tuning import SplitPlan
from attn_backends.kernels.examples import empty
from attn_backends.kernels.launch import power_of_two
from attn_backends.spec import KVCacheSpec, Limits, MLASpec

_WIDTH = 2  # pages of a row: no kernel is compiled for it
MakePlan = Callable[[MLASpec, int, int], SplitPlan]  # of a layer, for so many rows of so many query tokens


def list_decodes(
    specs: Iterable[MLASpec], cache: KVCacheSpec, limits: Limits, make_plan: MakePlan,
    launch: Callable[[MLASpec, SplitPlan, int, torch.Tensor, torch.Tensor, bool], None],
) -> None:  # fmt: skip
    """Launch each kind of decode once, in a listing.

    Args:
        launch: with a layer, a cut, query tokens of a row, absorbed queries [num_rows, query_len, num_qo_heads,
            latent_dim], the latent cache, and whether an LSE is wanted.
    """
    for spec in specs:
        latents = empty(2, cache.page_size, spec.latent_dim, dtype=spec.cache_dtype)
        for query_len, plan in _plans(spec, limits, make_plan):
            query = empty(plan.num_rows, query_len, spec.num_qo_heads, spec.latent_dim, dtype=spec.dtype)
            for want_lse in (False, True):
                launch(spec, plan, query_len, query, latents, want_lse)


def _plans(spec: MLASpec, limits: Limits, make_plan: MakePlan) -> Iterator[tuple[int, SplitPlan]]:
    """Query tokens of a row and cuts: of all that kernels are compiled alike for, one."""
    found: dict[tuple[object, ...], tuple[int, SplitPlan]] = {}
    for query_len in range(1, min(MLAMetadataBuilder.decode_threshold, limits.max_num_tokens) + 1):
        for num_rows in range(1, limits.max_num_requests + 1):
            plan = make_plan(spec, num_rows, query_len)
            found.setdefault((query_len, plan.tile, plan.tile_rows, power_of_two(num_rows)), (query_len, plan))
    yield from found.values()


def table_of(num_rows: int) -> torch.Tensor:
    return empty(num_rows, _WIDTH, dtype=torch.int32)
