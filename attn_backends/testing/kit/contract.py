"""Does it keep to its own tensors: slots, inputs, outputs, poison, and steps that do not depend on how work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.cache.views import as_kv_cache
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, Layout
from attn_backends.testing.cases.batches import Batch, Row
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import feature
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import (
    Result,
    assert_matches,
    assert_pool,
    assert_step,
    make_layer,
    output_error,
    padded,
    run_backend,
)
from attn_backends.testing.kit.base import WHOLE_PROMPTS, KitBase

CHUNKED = BatchShape(seq_lens=(40, 23, 7), query_lens=(40, 23, 7))
LONGER_BEHIND = BatchShape(seq_lens=(40, 23, 70), query_lens=(1, 1, 33))
CHUNK_EDGES = (5, 16, 17, 33, 40)  # query tokens done after each step
POSITIONAL = ["plain", "window_15", "chunks", "alibi", "sinks", "soft_cap"]


class Contract(KitBase):
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES], ids=str)
    def test_writes_its_slots_and_no_others(self, cache_dtype: torch.dtype | None, layout: Layout) -> None:
        spec = self.make_spec(cache_dtype=cache_dtype)
        scales = {"k_scale": 0.5, "v_scale": 2.0}  # powers of two: exact in any order of work
        if self.serves(spec, may_refuse=True, layout=layout):
            for shape in ("mixed_small", "page_edges_16", WHOLE_PROMPTS):
                batch = self.make_batch(spec, shape, layout=layout, lookahead=1, **scales)
                for num_padded_reqs in (0, 2):
                    result = run_backend(self.backend, batch, num_padded_reqs=num_padded_reqs)
                    assert_pool(result.kv_cache, batch.pool_after(), f"{shape} and {num_padded_reqs} padded rows")

    def test_cross_writes_at_the_first_step_only(self) -> None:
        spec = self.make_spec(attention_type=AttentionType.CROSS, causal=False)
        if self.serves(spec):
            shape = BatchShape(seq_lens=(40, 7), query_lens=(1, 1))
            for new_kv_lens in (None, (0, 7), (0, 0)):
                batch = self.make_batch(spec, shape, new_kv_lens=new_kv_lens)
                result = run_backend(self.backend, batch)
                assert_pool(result.kv_cache, batch.pool_after(), f"cross attention, new keys {new_kv_lens}")

    @pytest.mark.parametrize("shape", ["small_decode", "mixed_small"])
    def test_tensors_within_wider_ones(self, shape: str) -> None:
        """Tensors are slices, like those of a fused projection; nothing beside the output is written, whose heads lie
        at any distance. Sinks are every second number."""
        for _, spec in self.served([feature("plain"), feature("sinks")]):
            batch = self.make_batch(spec, shape)
            if batch.sinks is not None:
                batch = replace(batch, sinks=torch.stack([batch.sinks, batch.sinks + 9], dim=-1)[:, 0])
            layer, pool = make_layer(self.backend, batch), batch.fresh_pool()
            query, key, value = (
                torch.cat([given, given + 9], dim=1)[:, : given.shape[1]]
                for given in (batch.query, batch.key, batch.value)
            )
            heads, dim = spec.num_qo_heads, spec.head_dim_vo
            for wider in ((2 * heads, dim), (heads, dim + 3)):
                wide = query.new_full((len(query), *wider), torch.nan)
                output = wide[:, :heads, :dim]
                layer.impl.forward(query, key, value, pool, layer.begin(batch), output)
                assert_matches(Result(output, None, pool), batch, f"tensors within wider ones, of {wider}")
                output.fill_(torch.nan)
                assert bool(wide.isnan().all()), "what lies beside the output was written"

    @pytest.mark.parametrize("shape", [WHOLE_PROMPTS, "mixed_small"])
    @pytest.mark.parametrize("new_dtype", [torch.float32, torch.float64], ids=str)
    def test_new_keys_of_a_wider_dtype(self, new_dtype: torch.dtype, shape: str) -> None:
        """They are made the layer's: neither what is attended nor what is cached depends on how they came."""
        batch = self.make_batch(self.make_spec(), shape)
        layer, pool = make_layer(self.backend, batch), batch.fresh_pool()
        output = layer.impl.forward(
            batch.query, batch.key.to(new_dtype), batch.value.to(new_dtype), pool, layer.begin(batch)
        )
        assert_matches(Result(output, None, pool), batch, f"new keys in {new_dtype}")
        assert_pool(pool, batch.pool_after(), f"new keys in {new_dtype}")

    @pytest.mark.parametrize("cached", [True, False])
    def test_new_keys_whose_last_dimension_is_apart(self, cached: bool) -> None:
        """With a cache, and in a profile run, which reads them as they are."""
        batch = self.make_batch(self.make_spec(), WHOLE_PROMPTS, cached=cached)
        layer = make_layer(self.backend, batch)
        key, value = (torch.stack([new, new + 9], dim=-1)[..., 0] for new in (batch.key, batch.value))
        lse = torch.zeros(batch.query.shape[:2], dtype=torch.float32, device=batch.device) if self.can.lse else None
        output = layer.impl.forward(batch.query, key, value, batch.fresh_pool(), layer.begin(batch), lse=lse)
        assert_matches(Result(output, lse, None), batch, "new keys apart")

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode"])
    def test_a_cache_as_one_tensor(self, shape: str, layout: Layout) -> None:
        """[num_pages, 2, …], as FlashInfer's wrappers and vLLM have it: read and written where it lies. Where keys and
        values differ in width, and in another layout's shape, it is refused by name."""
        spec = self.make_spec()
        if not self.serves(spec, may_refuse=True, layout=layout):
            return
        batch = self.make_batch(spec, shape, layout=layout)
        layer, pool = make_layer(self.backend, batch), batch.fresh_pool()
        assert pool is not None
        given, step = (batch.query, batch.key, batch.value), layer.begin(batch)
        if self.can.mla or spec.head_dim != spec.head_dim_vo:
            with pytest.raises(ValueError, match="kv_cache is one tensor"):
                layer.impl.forward(*given, torch.stack([pool.key, pool.key], dim=1), step)
            return
        one = torch.stack([cached if layout == "NHD" else cached.transpose(1, 2) for cached in pool], dim=1)
        output = layer.impl.forward(*given, one, step)
        assert_step(Result(output, None, as_kv_cache(one, layout)), batch, f"{shape}, a cache as one {layout} tensor")
        turned = () if one.shape[2] == one.shape[3] else (one.transpose(2, 3),)
        for wrong in (one[:, :1], one[..., :-1], one.to(torch.int8), *turned):
            with pytest.raises(ValueError, match="kv_cache has shape"):
                layer.impl.forward(*given, wrong, step)

    @pytest.mark.parametrize("apart", ["query", "output", "lse", "kv_cache.key", "kv_cache.value"])
    def test_tensors_whose_last_dimension_is_apart(self, apart: str) -> None:
        """Right, or refused by name: never numbers of other elements."""
        batch = self.make_batch(self.make_spec(), "mixed_small")
        if (apart == "lse" and not self.can.lse) or (apart == "kv_cache.value" and self.can.mla):
            return
        layer, pool = make_layer(self.backend, batch), batch.fresh_pool()
        assert pool is not None
        given = {
            "query": batch.query,
            "output": batch.query.new_zeros(*batch.query.shape[:2], batch.spec.head_dim_vo),
            "lse": torch.zeros(batch.query.shape[:2], dtype=torch.float32, device=batch.device),
            "kv_cache.key": pool.key,
            "kv_cache.value": pool.value,
        }
        given[apart] = given[apart].mT.contiguous().mT
        query, output, lse, *cached = given.values()
        kv_cache = KVCache(*cached)
        asked = lse if self.can.lse else None
        try:
            layer.impl.forward(query, batch.key, batch.value, kv_cache, layer.begin(batch), output, lse=asked)
        except ValueError as error:
            if apart not in str(error):
                raise AssertionError(f"{apart} is refused, and not by its name: {error}") from error
        else:
            assert_matches(Result(output, asked, kv_cache), batch, f"{apart} apart")

    @pytest.mark.parametrize("shape", ["page_edges_16", "spec_verify", "small_prefill", "mixed_medium"])
    def test_reordering_requests_permutes_outputs(self, shape: str) -> None:
        batch = self.make_batch(self.make_spec(), shape)
        single = [i for i, row in enumerate(batch.rows) if row.data.query_len == 1]
        longer = [i for i, row in enumerate(batch.rows) if row.data.query_len > 1]
        order = [*single[::-1], *longer[1:], *longer[:1]]
        parts = torch.split(run_backend(self.backend, batch).output, [row.data.query_len for row in batch.rows])
        expected = torch.cat([parts[i] for i in order]).double().cpu()
        error = output_error(run_backend(self.backend, batch.reordered(order)).output, expected)
        allowed = batch.tolerance
        assert error <= allowed, f"requests in the order {order} give other outputs: off by {error:.2e}"

    @pytest.mark.parametrize("name", POSITIONAL)
    def test_chunked_prefill_equals_whole(self, name: str) -> None:
        for _, spec in self.served([feature(name)]):
            self.check_chunked(spec)

    @pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES], ids=str)
    def test_chunked_prefill_equals_whole_with_scales(self, cache_dtype: torch.dtype | None) -> None:
        spec = self.make_spec(cache_dtype=cache_dtype)
        if self.serves(spec, may_refuse=True):
            self.check_chunked(spec, k_scale=0.37, v_scale=1.9)

    def check_chunked(self, spec: AttentionSpec, **how: float) -> None:
        """One builder and one pool; short requests end early, and steps of one token are decodes among prefills."""
        batch = self.make_batch(spec, CHUNKED, **how)
        layer = make_layer(self.backend, batch)
        whole = layer.forward(batch, layer.begin(batch))
        assert_matches(whole, batch, "the whole prefill")
        out, lse = (torch.split(part, list(CHUNKED.query_lens)) for part in batch.expected())
        pool, done = batch.fresh_pool(), 0
        for edge in CHUNK_EDGES:
            parts = [(i, done, min(n, edge)) for i, n in enumerate(CHUNKED.query_lens) if n > done]
            parts.sort(key=lambda part: part[2] - part[1] > 1)
            step = batch.cut(parts)
            expected = tuple(torch.cat([whole[i][a:b] for i, a, b in parts]) for whole in (out, lse))
            result = layer.forward(step, layer.begin(step), kv_cache=pool)
            assert_matches(result, step, f"tokens {done} to {edge} of a chunked prefill", (expected[0], expected[1]))
            done = edge
        assert_pool(pool, whole.kv_cache, "chunked against whole")

    @pytest.mark.parametrize("cache_dtype", [None, *FP8_DTYPES], ids=str)
    @pytest.mark.parametrize("name", POSITIONAL)
    def test_nan_never_leaks(self, name: str, cache_dtype: torch.dtype | None) -> None:
        """NaN in unused pages, page tails, slots not yet written, and the padded rows of q, k and v."""
        spec = self.feature_spec(feature(name), cache_dtype=cache_dtype)
        if self.serves(spec, may_refuse=cache_dtype is not None):
            for shape in ("mixed_small", "page_edges_16", "spec_verify", WHOLE_PROMPTS):
                batch = self.make_batch(spec, shape, poison=float("nan"), lookahead=1)
                self.check_batch(batch, f"{shape} in a pool of NaN", num_padded_reqs=2)

    @pytest.mark.parametrize("num_padded_reqs", [1, 5])
    @pytest.mark.parametrize("shape", ["small_decode", "page_edges_16", "mixed_small", "single_decode"])
    def test_padded_rows_are_zero(self, shape: str, num_padded_reqs: int) -> None:
        """Rows that only fill a graph's batch: outputs of zeros, nothing written, no other row disturbed."""
        batch = self.make_batch(self.make_spec(), shape)
        self.check_batch(batch, f"{shape} and {num_padded_reqs} padded rows", num_padded_reqs=num_padded_reqs)

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", WHOLE_PROMPTS], ids=str)
    def test_inputs_are_not_changed(self, shape: BatchShape | str) -> None:
        batch = self.make_batch(self.make_spec(), shape)
        layer, common, groups = make_layer(self.backend, batch), batch.common(), batch.groups
        inputs = (batch.query, batch.key, batch.value, common, groups)
        before = snapshot(inputs)
        step = layer.state.begin_forward(layer.builder.build(0, common))
        planned = snapshot(step.metadata)
        layer.impl.forward(*inputs[:3], batch.fresh_pool(), step)
        found = differences(before, snapshot(inputs)) + differences(planned, snapshot(step.metadata))
        assert not found, f"a step changed what it was given: {found}"

    @pytest.mark.parametrize("num_padded_reqs", [0, 2])
    def test_output_is_written_in_place(self, num_padded_reqs: int) -> None:
        """`output=` is returned itself, and written exactly: it is the middle of a larger tensor here."""
        batch = self.make_batch(self.make_spec(), "mixed_small")
        layer = make_layer(self.backend, batch, num_padded_reqs=num_padded_reqs)
        query, key, value = (padded(new, num_padded_reqs) for new in (batch.query, batch.key, batch.value))
        around = query.new_full((len(query) + 2, batch.spec.num_qo_heads, batch.spec.head_dim_vo), torch.nan)
        output = around[1:-1]
        step = layer.begin(batch, num_padded_reqs=num_padded_reqs)
        returned = layer.impl.forward(query, key, value, batch.fresh_pool(), step, output)
        assert returned is output, "forward() returns another tensor than the output it was given"
        assert_matches(Result(output, None, None), batch, "output=")
        assert bool(around[[0, -1]].isnan().all()), "forward() wrote outside the output it was given"

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", WHOLE_PROMPTS], ids=str)
    def test_keys_that_are_cached_already(self, shape: BatchShape | str) -> None:
        """An engine that writes its keys itself gives none: all are read from the cache, and nothing is written."""
        self.check_cached_keys(shape)

    def test_profile_run(self) -> None:
        """No pages and no cache yet: causal attention among the new tokens."""
        for name in POSITIONAL:
            for _, spec in self.served([feature(name)]):
                for shape in (WHOLE_PROMPTS, BatchShape(seq_lens=(64,), query_lens=(64,))):
                    batch = self.make_batch(spec, shape, cached=False)
                    assert_matches(run_backend(self.backend, batch), batch, f"{name}, profile run")

    def test_lookahead_pages_change_nothing(self) -> None:
        ahead = self.make_batch(self.make_spec(), "page_edges_16", lookahead=2)
        exact = replace(ahead, rows=tuple(_without_lookahead(row, ahead) for row in ahead.rows))
        layer = make_layer(self.backend, ahead)
        metadata = [snapshot(layer.builder.build(0, batch.common())) for batch in (ahead, exact)]
        assert not differences(*metadata), f"lookahead pages change the metadata: {differences(*metadata)}"
        result = layer.forward(ahead, layer.begin(ahead))
        assert_step(result, ahead, "with lookahead pages")

    def test_layers_keep_to_their_own_cache(self) -> None:
        """One step serves two layers, each with a pool of its own."""
        first = self.make_batch(self.make_spec(), "mixed_small")
        second = replace(first, rows=tuple(map(_of_another_layer, first.rows)))
        layer = make_layer(self.backend, first)
        step = layer.begin(first)
        for batch in (first, second, first):
            assert_step(layer.forward(batch, step), batch, "one of two layers of a step")

    @pytest.mark.parametrize("shape", ["small_decode", "mixed_small", LONGER_BEHIND], ids=str)
    def test_layers_follow_each_other_at_once(self, shape: BatchShape | str) -> None:
        """Each attends the keys that it writes, in slots where the layer in front of it wrote others."""
        first = self.make_batch(self.make_spec(), shape)
        second = replace(first, rows=tuple(map(_of_another_layer, first.rows)))
        layer, pool = make_layer(self.backend, first), first.fresh_pool()
        step = layer.begin(first)
        given = [(batch.query, batch.key, batch.value) for batch in (first, second)]
        outputs = [layer.impl.forward(*tensors, pool, step) for _ in range(8) for tensors in given]
        expected = [batch.expected() for batch in (first, second)]
        for nth, output in enumerate(outputs):
            assert_matches(Result(output, None, None), first, f"layer {nth} of {len(outputs)}", expected[nth % 2])
        assert_pool(pool, second.pool_after(), "after all layers")


def _without_lookahead(row: Row, batch: Batch) -> Row:
    pages: Sequence[int] = list(row.data.pages if row.data.pages is not None else [])
    return replace(row, data=replace(row.data, pages=pages[: -(-row.data.seq_len // batch.cache.page_size)]))


def _of_another_layer(row: Row) -> Row:
    """The same request in the same pages with other queries, and other keys and values to write."""
    sign = torch.where(torch.arange(row.data.seq_len, device="cpu") < row.num_cached, 1, -1)
    key, value = (new * sign.view(-1, *[1] * (new.dim() - 1)) for new in (row.key, row.value))
    return replace(row, query=-row.query, key=key, value=value)
