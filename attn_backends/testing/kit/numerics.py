"""Does it compute attention: every shape, feature, dtype, layout and page size against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import FP8_DTYPES, Layout
from attn_backends.testing.cases.batches import as_bits
from attn_backends.testing.cases.cases import BatchShape, load_cases
from attn_backends.testing.cases.features import (
    CROSS,
    ENCODER,
    FEATURES,
    NON_CAUSAL_ALIBI,
    Feature,
    feature,
    plain_cache,
)
from attn_backends.testing.cases.random_layers import KINDS, random_layers
from attn_backends.testing.harness import Result, assert_matches, assert_step, make_layer, make_layers, run_backend
from attn_backends.testing.kit.base import WHOLE_PROMPTS, KitBase

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEATURE_SHAPES = ("small_prefill", "mixed_small", "page_edges_16", "spec_verify", WHOLE_PROMPTS)
K_SCALE, V_SCALE = 0.37, 1.9  # far apart, so that one used for the other shows
PREFIX_PAGES = 3
SHAPES = ("mixed_small", "small_decode", "spec_verify", WHOLE_PROMPTS)
SHARED_PAGES = 2
IN_EVERY_DTYPE = ("plain", "soft_cap_and_sinks", "alibi_and_window")


class Numerics(KitBase):
    num_random_layers: ClassVar[int] = 6  # of each kind

    @pytest.mark.parametrize("shape", load_cases().batches)
    def test_matches_the_reference(self, shape: str, dtype: torch.dtype) -> None:
        spec = self.make_spec(dtype=dtype)
        assert self.serves(spec)
        self.check(spec, [shape])

    def test_alibi_of_keys_ahead(self, dtype: torch.dtype) -> None:
        """A bias that grows with the distance, until 16 bits would round it by a good part of a key's weight."""
        for _, spec in self.served([NON_CAUSAL_ALIBI], dtype=dtype):
            self.check(spec, [BatchShape(seq_lens=(100,), query_lens=(60,))])
            self.check(spec, [WHOLE_PROMPTS], "without a cache", cached=False)

    @pytest.mark.parametrize("name", [f.name for f in FEATURES])
    def test_features(self, name: str, dtype: torch.dtype) -> None:
        for _, spec in self.served([feature(name)], dtype=dtype):
            self.check(spec, FEATURE_SHAPES, name)

    @pytest.mark.parametrize("name", [f.name for f in FEATURES if f.name != "plain"])
    def test_features_on_long_mixed_batches(self, name: str) -> None:
        for _, spec in self.served([feature(name)]):
            self.check(spec, ["mixed_medium"], name)

    @pytest.mark.parametrize("kind", KINDS)
    def test_random_layers(self, kind: str) -> None:
        """What the other cases did not think of: any numbers, heads, pages and rows together."""
        numbers = Random(f"scales of {kind}")
        for drawn in random_layers(kind, self.num_random_layers):
            heads = {} if self.can.mla else {"num_qo_heads": drawn.num_qo_heads, "num_kv_heads": drawn.num_kv_heads}
            spec = self.feature_spec(drawn.feature, **heads)
            pages: dict[str, Any] = {"page_size": drawn.page_size, "layout": drawn.layout}
            if not self.serves(spec, may_refuse=True, **pages):
                pages = {}  # the plain ones
                if not self.serves(spec, may_refuse=True):
                    continue
            cache = replace(plain_cache(self.can), **pages)
            prefix = drawn.shared_len // cache.page_size * cache.page_size
            k_scale, v_scale = numbers.choice(((1.0, 1.0), draw_scales(numbers)))
            batch = self.make_batch(
                spec, drawn.rows, page_size=cache.page_size, layout=cache.layout, poison=float("nan"),
                new_kv_lens=drawn.new_kv_lens, cached=drawn.cached, shared_prefix_len=prefix,
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            result = run_backend(
                self.backend, batch, common_prefix_len=prefix, num_padded_reqs=drawn.num_padded_reqs,
                want_lse=drawn.want_lse and self.can.lse,
            )  # fmt: skip
            what = f"{drawn} over {cache}, scales {k_scale} and {v_scale}"
            assert_step(result, batch, what)

    @pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (9, 3)])
    def test_heads(self, num_qo_heads: int, num_kv_heads: int) -> None:
        spec = self.make_spec(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
        if self.serves(spec, may_refuse=True):
            self.check(spec, ["mixed_small", WHOLE_PROMPTS])

    @pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256, 512])
    def test_head_dims(self, head_dim: int, dtype: torch.dtype) -> None:
        """In every dtype: tiles of wide heads may not fit in one and fit in a narrower one, which then serves."""
        narrower = [other for other in self.tested_dtypes if other.itemsize < dtype.itemsize]
        each = [self.make_spec(head_dim=head_dim, dtype=other) for other in narrower]
        is_served = any(not self.backend.reject(spec, plain_cache(self.can), self.device) for spec in each)
        spec = self.make_spec(head_dim=head_dim, dtype=dtype)
        if self.serves(spec, may_refuse=is_served):
            self.check(spec, ["mixed_small"])

    @pytest.mark.parametrize("wider", ["keys", "values"])
    def test_unequal_head_dims(self, wider: str, dtype: torch.dtype) -> None:
        """Head dims are as far apart as they may be, in every dtype: narrow rows lie in shared memory in another
        way."""
        dims = sorted(self.can.head_dims or {32, 64})
        low, high = dims[0] if len(dims) > 1 else max(1, dims[0] // 2), dims[-1]
        head_dim, head_dim_vo = (high, low) if wider == "keys" else (low, high)
        spec = self.make_spec(head_dim=head_dim, head_dim_vo=head_dim_vo, dtype=dtype)
        if self.serves(spec, may_refuse=True):
            self.check(spec, ["mixed_small", WHOLE_PROMPTS])

    @pytest.mark.parametrize("scale", [0.0, -0.2])
    def test_scales_of_zero_and_below(self, scale: float, dtype: torch.dtype) -> None:
        """Keys that a query does not see stay hidden, and so do slots behind a row's last key."""
        if self.serves(spec := self.make_spec(scale=scale, dtype=dtype), may_refuse=True):
            self.check(spec, ["small_decode", "mixed_small", "page_edges_16", WHOLE_PROMPTS])

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("page_size", [1, 16, 32, 64, 256])
    def test_page_sizes_and_layouts(self, page_size: int, layout: Layout) -> None:
        """Lengths on both sides of each page's edge."""
        spec = self.make_spec()
        edges = [n for pages in (1, 2) for n in (pages * page_size - 1, pages * page_size, pages * page_size + 1) if n]
        decodes = BatchShape(seq_lens=tuple(edges), query_lens=(1,) * len(edges))
        prefills = BatchShape(seq_lens=tuple(edges), query_lens=tuple(min(n, 5) for n in edges))
        if self.serves(spec, may_refuse=True, page_size=page_size, layout=layout):
            self.check(spec, [decodes, prefills, "mixed_small"], page_size=page_size, layout=layout)

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("cache_dtype", [*FP8_DTYPES, *FLOATS], ids=str)
    def test_cache_dtypes(self, cache_dtype: torch.dtype, layout: Layout, dtype: torch.dtype) -> None:
        """A cache in another dtype than the queries, with scales; the reference reads the same rounded values."""
        spec = self.make_spec(dtype=dtype, cache_dtype=cache_dtype)
        if self.serves(spec, may_refuse=True, layout=layout):
            shapes = ["small_decode", "mixed_small", "page_edges_16"]
            self.check(spec, shapes, layout=layout, k_scale=K_SCALE, v_scale=V_SCALE)

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES], ids=str)
    def test_interleaved_caches(self, cache_dtype: torch.dtype | None, layout: Layout, dtype: torch.dtype) -> None:
        """Keys and values side by side in one tensor, as engines allocate them: right, or refused by name."""
        spec = self.make_spec(dtype=dtype, cache_dtype=cache_dtype)
        if not self.serves(spec, may_refuse=True, layout=layout):
            return
        for shape in ("small_decode", "mixed_small", WHOLE_PROMPTS):
            how = {"layout": layout, "k_scale": K_SCALE, "v_scale": V_SCALE, "poison": float("nan")}
            batch = self.make_batch(spec, shape, **how)
            pool = batch.fresh_pool()
            assert pool is not None
            try:
                result = run_backend(self.backend, batch, kv_cache=interleaved(pool, layout))
            except ValueError as error:
                if "kv_cache" not in str(error):
                    raise AssertionError(f"interleaved caches are refused, and not by name: {error}") from error
            else:
                assert_step(result, batch, f"{shape}, keys and values interleaved")

    @pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
    def test_windows_over_several_tiles(self, cache_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        """A chunk and a prompt whose tiles of queries begin ahead of the window's first block, and one within it.

        One head for each KV head, so that tiles hold many tokens, and a head dim that most libraries cut blocks for.
        """
        heads = {} if self.can.mla else {"num_qo_heads": 1, "num_kv_heads": 1}
        dim = {"head_dim": 128} if 128 in (self.can.head_dims or ()) and not self.can.mla else {}
        spec = self.make_spec(window_left=500, dtype=dtype, cache_dtype=cache_dtype, **heads, **dim)
        if self.serves(spec, may_refuse=True):
            for seq_len, query_len in ((828, 128), (700, 700), (450, 450)):
                self.check(spec, [BatchShape(seq_lens=(seq_len,), query_lens=(query_len,))], "window of 500")

    @pytest.mark.parametrize("window_left", [-1, 900])
    def test_short_chunks_behind_long_prefixes(self, window_left: int, dtype: torch.dtype) -> None:
        """One KV head, so that few tiles of queries read all keys and kernels split these; and beside such rows, a
        decode and a chunk that is not worth it."""
        heads = {} if self.can.mla else {"num_qo_heads": 2, "num_kv_heads": 1}
        spec = self.make_spec(window_left=window_left, dtype=dtype, **heads)
        if self.serves(spec, may_refuse=True):
            shapes = (
                BatchShape(seq_lens=(2500,), query_lens=(40,)),
                BatchShape(seq_lens=(9, 2300, 300, 1700), query_lens=(1, 30, 17, 33)),
            )
            self.check(spec, shapes, f"chunks behind prefixes, window {window_left}")

    def test_encoder(self, dtype: torch.dtype) -> None:
        """Both ways over this step's own tokens, with no cache."""
        for _, spec in self.served([ENCODER], dtype=dtype):
            self.check(spec, [WHOLE_PROMPTS, BatchShape(seq_lens=(1, 1), query_lens=(1, 1))])

    def test_cross(self, dtype: torch.dtype) -> None:
        """The first step writes the encoder's keys, later ones write nothing; a row may have no keys at all."""
        for _, spec in self.served([CROSS], dtype=dtype):
            encoder = (40, 7, 33, 0)
            first = BatchShape(seq_lens=encoder, query_lens=(1, 1, 4, 3))
            later = BatchShape(seq_lens=encoder, query_lens=(1, 1, 1, 1))
            self.check(spec, [first], "cross, first step,")
            self.check(spec, [later, first], "cross, later step,", new_kv_lens=(0, 0, 0, 0))
            self.check(spec, [first], "cross, some rows new,", new_kv_lens=(0, 7, 0, 0))

    @pytest.mark.parametrize("cached_prefix", [True, False], ids=["hint", "no_hint"])
    @pytest.mark.parametrize("name", ["plain", "soft_cap", "sinks", "window_15", "alibi", "chunks", "non_causal"])
    def test_shared_prefix(self, name: str, cached_prefix: bool) -> None:
        """Rows whose first pages are the same ones, with and without saying so (cascade)."""
        prefix = PREFIX_PAGES * self.page_size
        tails, queries = (1, 9, 30, 3, 20), (1, 1, 1, 3, 12)
        shape = BatchShape(seq_lens=tuple(prefix + n for n in tails), query_lens=queries)
        for _, spec in self.served([feature(name)]):
            for rows in (3, 5, 1):
                batch = self.make_batch(spec, shape, shared_prefix_len=prefix)
                batch = replace(batch, rows=batch.rows[:rows])
                hint = prefix if cached_prefix else 0
                for padded in (0, 2):
                    what = f"{name}, {rows} rows and {padded} padded ones, prefix {hint}"
                    self.check_batch(batch, what, common_prefix_len=hint, num_padded_reqs=padded)

    def test_plan_groups_share_one_state(self) -> None:
        """Two groups of other constants, both planned before either runs; a plan serves many layers."""
        spec = self.make_spec()
        others = [self.feature_spec(feature(name)) for name in ("scale", "window_15", "soft_cap")]
        specs = [spec, *(other for other in others if self.serves(other))]
        batches = [self.make_batch(spec, "mixed_small", seed=3) for spec in specs]
        layers = make_layers(self.backend, batches)
        steps = [layer.begin(batch) for layer, batch in zip(layers, batches, strict=True)]
        for _ in range(2):
            for layer, step, batch in zip(layers, steps, batches, strict=True):
                assert_matches(layer.forward(batch, step), batch, f"plan group {batch.spec}")

    def test_views_of_one_projection(self, dtype: torch.dtype) -> None:
        """Queries, keys and values as models hand them over: strided views of one matrix product."""
        batch = self.make_batch(self.make_spec(dtype=dtype), "mixed_small")
        tensors = (batch.query, batch.key, batch.value)
        fused = torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)
        parts = torch.split(fused, [tensor[0].numel() for tensor in tensors], dim=1)
        query, key, value = (part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
        layer = make_layer(self.backend, batch)
        output = layer.impl.forward(query, key, value, batch.fresh_pool(), layer.begin(batch))
        assert_matches(Result(output, None, None), batch, "strided inputs")


def interleaved(pool: KVCache, layout: Layout) -> KVCache:
    """The same cache as two views of one tensor, whose slots hold a head's key and then its value."""
    ordered = [as_bits(cached if layout == "NHD" else cached.transpose(1, 2)) for cached in pool]
    both = torch.cat(ordered, dim=-1)
    parts = both.split([part.shape[-1] for part in ordered], dim=-1)
    views = [part.view(cached.dtype) for part, cached in zip(parts, pool, strict=True)]
    return KVCache(*(view if layout == "NHD" else view.transpose(1, 2) for view in views))


def draw_scales(numbers: Random) -> tuple[float, float]:
    """Scales of keys and of values, one below 1 and one above, so that neither serves for the other."""
    drawn = [numbers.uniform(0.2, 0.6), numbers.uniform(1.7, 4.0)]
    numbers.shuffle(drawn)
    return drawn[0], drawn[1]


def scale_pairs(name: str) -> tuple[tuple[float, float], ...]:
    """(k_scale, v_scale) of keys alone, of values alone and of both; the same name gives the same ones."""
    k_scale, v_scale = draw_scales(Random(name))
    return (k_scale, 1.0), (1.0, v_scale), (k_scale, v_scale)


class Scales(KitBase):
    @pytest.mark.parametrize("name", [f.name for f in (*FEATURES, CROSS)])
    def test_scales_over_float_caches(self, name: str) -> None:
        """With every feature; a scale that is dropped where the cache is written or where it is read shows."""
        self.check_scales(name, self.dtype)

    @pytest.mark.parametrize("name", IN_EVERY_DTYPE)
    def test_scales_in_every_dtype(self, name: str, dtype: torch.dtype) -> None:
        """What other dtypes have of their own: they choose kernels, and are rounded where they are written."""
        if dtype is not self.dtype:
            self.check_scales(name, dtype)

    def check_scales(self, name: str, dtype: torch.dtype) -> None:
        for _, spec in self.served([feature(name)], dtype=dtype):
            for nth, (k_scale, v_scale) in enumerate(scale_pairs(name)):
                shapes = SHAPES[nth % 2 :: 2] if nth < 2 else SHAPES[:2]
                self.check(spec, shapes, f"{name}, scales {k_scale} and {v_scale},", k_scale=k_scale, v_scale=v_scale)

    @pytest.mark.parametrize("asked", [feature("plain"), feature("sinks"), ENCODER], ids=lambda asked: asked.name)
    def test_scales_are_of_the_cache_alone(self, asked: Feature) -> None:
        """Keys that no cache holds, as in a profile run and in an encoder, have none."""
        for _, spec in self.served([asked]):
            for k_scale, v_scale in scale_pairs(asked.name):
                self.check(spec, [WHOLE_PROMPTS], "without a cache", cached=False, k_scale=k_scale, v_scale=v_scale)

    @pytest.mark.parametrize("name", ["plain", "soft_cap", "sinks", "soft_cap_and_sinks", "window_15", "alibi"])
    def test_scales_with_a_shared_prefix(self, name: str) -> None:
        """A prefix that is attended once for all rows is read with the same scales as what joins it."""
        prefix = SHARED_PAGES * self.page_size
        shape = BatchShape(seq_lens=tuple(prefix + n for n in (1, 9, 20)), query_lens=(1, 1, 12))
        for _, spec in self.served([feature(name)]):
            for k_scale, v_scale in scale_pairs(name):
                batch = self.make_batch(spec, shape, shared_prefix_len=prefix, k_scale=k_scale, v_scale=v_scale)
                what = f"{name}, shared prefix, scales {k_scale}, {v_scale}"
                self.check_batch(batch, what, common_prefix_len=prefix)
