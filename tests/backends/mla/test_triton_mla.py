"""TRITON_MLA passes the family's conformance kit: interpreted on a CPU, in a process of its own, and compiled on a GPU.

Its kernel's own roads (rows split and joined, tiles of fewer rows than a token has heads, blocks larger and smaller
than pages) are taken by `Splits`, with tiles that small batches reach. What is the family's alone (`SHARED`) is
TORCH_MLA's to show, as the interpreter is slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends import MLASpec
from attn_backends.registry import validate_options
from attn_backends.spec import FP8_DTYPES
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import MLAConformance
from attn_backends.testing.harness import assert_matches, make_layer
from attn_backends.testing.kit.base import KitBase
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

MAX_SPLITS = pytest.importorskip("attn_backends.kernels.split_kv").MAX_SPLITS
triton_mla = pytest.importorskip("attn_backends.backends.mla.triton_mla.launch")
triton_tiles = pytest.importorskip("attn_backends.backends.mla.triton_mla.tuning")

SHARED = "chunk or reorder or shared_prefix or features_on_long or head_counts or host_reads"
# Of blocks and pages each of the two within the other, and neither; NaN is kept out of every cache alike.
LIKE_OTHERS = "split_rows and (16-16 or 16-48 or 32-64) or nan and float8"
# The others are another test's, so that two workers share them.
CORE = "matches or features or replays or nan or verify or not TestTritonMLA"
TILE = {"rows": 16, "keys": 16, "warps": 4, "stages": 2, "programs": 16, "min_keys": 16}
SHAPES = (
    BatchShape(seq_lens=(200, 5, 77), query_lens=(1, 1, 1)),
    BatchShape(seq_lens=(150, 3, 64), query_lens=(3, 3, 3)),
)


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__, f"not ({SHARED} or {LIKE_OTHERS}) and ({CORE})")


@pytest.mark.rest
@in_own_process
def test_more_interpreted() -> None:
    run_interpreted(__file__, f"not ({SHARED} or {LIKE_OTHERS} or {CORE})")


class Splits(KitBase):
    backend_name = "TRITON_MLA"

    @pytest.mark.parametrize("page_size", [16, 48, 64])
    @pytest.mark.parametrize("keys", [16, 32])
    @pytest.mark.parametrize("shape", SHAPES, ids=["one_token", "verify"])
    def test_split_rows_are_joined(self, shape: BatchShape, keys: int, page_size: int) -> None:
        self.check_splits(self.make_spec(num_qo_heads=6), shape, {"keys": keys}, page_size)

    @pytest.mark.parametrize("num_qo_heads", [1, 16, 40])
    def test_tiles_of_heads(self, num_qo_heads: int) -> None:
        """Less than a tile, one, and several, of which the last is not full."""
        self.check_splits(self.make_spec(num_qo_heads=num_qo_heads), SHAPES[1], {}, 16)

    @pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, None])
    def test_half_precision_over_caches(self, cache_dtype: torch.dtype | None) -> None:
        changes = {} if cache_dtype is None else {"cache_dtype": cache_dtype}
        self.check_splits(self.make_spec(dtype=torch.float16, **changes), SHAPES[0], {"keys": 32}, 16)

    def check_splits(self, spec: Any, shape: BatchShape, changes: dict[str, int], page_size: int) -> None:
        options = validate_options("TRITON_MLA", {"decode_tile": TILE | changes})
        scale = 0.5 if spec.cache_dtype.itemsize == 1 else 1.0
        batch = self.make_batch(spec, shape, page_size=page_size, k_scale=scale, poison=float("nan"))
        layer, expected = make_layer(self.backend, batch, options=options), batch.expected()
        for want_lse in (False, True, True):  # the same list serves every launch
            step = layer.begin(batch)
            assert has_splits(step.plan.work_list), "no row is split"  # type: ignore[attr-defined]
            assert_matches(layer.forward(batch, step, want_lse=want_lse), batch, "split rows", expected)


def has_splits(listed: Any) -> bool:
    """Whether a program of a list has a part of a row."""
    more = [range(begin, end) for begin, end in listed.more_items.tolist()]
    items = [listed.work_items[at].tolist() for nth, others in enumerate(more) for at in (nth, *others)]
    return any(row >= 0 and info >= 2 * MAX_SPLITS.value for row, _, _, _, info, *_ in items)


class ModelShape(MLAConformance):
    """Widths and heads of DeepSeek-V2-Lite."""

    backend_name = "TRITON_MLA"
    dtypes = (torch.bfloat16,)

    def make_spec(self, **changes: Any) -> MLASpec:
        return MLASpec(**{"num_qo_heads": 16, "dtype": self.dtype, **changes})


@only_interpreted
class TestTritonMLAInterpreted(MLAConformance, Splits):
    backend_name = "TRITON_MLA"
    dtypes = (torch.float32,)  # the interpreter multiplies no bfloat16, and Splits has float16


@pytest.mark.gpu
class TestTritonMLA(MLAConformance, Splits):
    backend_name = "TRITON_MLA"
    device = "cuda"


@pytest.mark.gpu
class TestTritonMLAModelShape(ModelShape):
    device = "cuda"


@pytest.mark.gpu
class TestTritonMLAManyHeads(ModelShape):
    """As the kernel for Hopper serves them, in the pages that FlashMLA has."""

    device = "cuda"

    def make_spec(self, **changes: Any) -> MLASpec:
        return super().make_spec(**{"num_qo_heads": 48, **changes})

    def make_batch(self, spec: Any, shape: BatchShape | str, **how: Any) -> Any:
        page_size = how.pop("page_size", 16 if how.get("shared_prefix_len") else 64)  # prefixes are multiples of 16
        return super().make_batch(spec, shape, page_size=page_size, **how)


ROWS = (*SHAPES, BatchShape(seq_lens=(1500, 64, 700), query_lens=(2, 2, 2)))


@pytest.mark.gpu
class TestOnHopper(KitBase):
    """Tiles of 64 queries, which a kernel of their own serves on Hopper: split rows, tiles that are not full, blocks
    that masks cross, and NaN behind the last key."""

    backend_name = "TRITON_MLA"
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("page_size", [16, 48, 64, 128])
    @pytest.mark.parametrize("heads", [16, 40, 128])
    @pytest.mark.parametrize("shape", ROWS, ids=str)
    def test_rows(self, shape: BatchShape, heads: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check_rows(MLASpec(heads, dtype=self.dtype), shape, page_size, monkeypatch)

    @pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
    @pytest.mark.parametrize("page_size", [16, 64])
    @pytest.mark.parametrize("heads", [16, 40, 128])
    @pytest.mark.parametrize("shape", ROWS, ids=str)
    def test_rows_of_8_bits(
        self, shape: BatchShape, heads: int, page_size: int, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = MLASpec(heads, dtype=self.dtype, cache_dtype=cache_dtype)
        self.check_rows(spec, shape, page_size, monkeypatch, k_scale=0.5)

    def check_rows(
        self, spec: MLASpec, shape: BatchShape, page_size: int, monkeypatch: pytest.MonkeyPatch, **scales: float
    ) -> None:
        sizes = dict(zip(("rows", "keys", "warps", "stages"), triton_tiles.HOPPER_TILE, strict=True))
        tile = {**TILE, **sizes, "min_keys": 128, "hopper": True}
        batch = self.make_batch(spec, shape, page_size=page_size, poison=float("nan"), **scales)
        made, seen = triton_mla._on_hopper, []
        monkeypatch.setattr(triton_mla, "_on_hopper", lambda *given: seen.append(given[0]) or made(*given))
        options = validate_options("TRITON_MLA", {"decode_tile": tile})
        layer, expected = make_layer(self.backend, batch, options=options), batch.expected()
        for want_lse in (False, True):
            step = layer.begin(batch)
            assert_matches(layer.forward(batch, step, want_lse=want_lse), batch, "tiles of 64", expected)
        assert len(seen) == 2
