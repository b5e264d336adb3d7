"""Batches as engines have them: tensors that exist already, rows and tokens of padding, any page behind a row's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.interface.plans import Plans
from attn_backends.spec import FP8_DTYPES
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import FEATURES, feature
from attn_backends.testing.graphs.harness import CapturedStep, batch_of_table, make_recorder, step_table
from attn_backends.testing.graphs.host_reads import forbid_host_reads
from attn_backends.testing.graphs.mixed import engine_tensors, put_pages
from attn_backends.testing.harness import Layer, Result, assert_matches, assert_step, limits_for, make_layer
from attn_backends.testing.kit.graphs import PAGES, ROWS, Graphs

JUNK_PAGES = (-1, 2**31 - 1, -(2**31), 1 << 30)  # what engines leave behind a row's own pages
TAIL = 3  # tokens that belong to no row


def engine_batch(
    batch: Batch, numbers: Random, *, idle_rows: int = 0, tail: int = 0, writes: bool = True
) -> CommonAttentionMetadata:
    """A batch by `from_tensors`: rows of zero tokens among its own and behind them, tokens of no row at its end, and
    pages behind every row's end that no pool has.

    Args:
        writes: whether the step brings keys; False: the engine has written them.
    """
    own, device = batch.common(), batch.device
    num_rows = len(batch.rows) + idle_rows
    places = sorted(numbers.sample(range(num_rows), len(batch.rows)))
    query_lens, seq_lens = (torch.zeros(num_rows, dtype=torch.int32, device="cpu") for _ in range(2))
    seq_lens.fill_(numbers.choice((0, 1)))
    query_lens[places], seq_lens[places] = own.query_lens_cpu, own.seq_lens_cpu
    starts = torch.nn.functional.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0))
    table = own.page_table.new_full((num_rows, own.page_table.shape[1] + 5), numbers.choice(JUNK_PAGES), device="cpu")
    put_pages(table[:, 1:-2], places, own)
    slots = torch.cat([own.slot_mapping, own.slot_mapping.new_full((tail,), PAD_SLOT)])
    common = CommonAttentionMetadata.from_tensors(
        own.page_size, starts.to(device, copy=True), starts, seq_lens.to(device, copy=True), seq_lens,
        table.to(device)[:, 1:-2],
        slots if writes else None, num_tokens=own.num_tokens + tail,
    )  # fmt: skip
    starts.fill_(-7)  # an engine's next step
    seq_lens.fill_(-7)
    return common


class Engines(Graphs):
    """Cases of batches that come from another engine's tensors."""

    def check_engine_batch(self, layer: Layer, batch: Batch, common: CommonAttentionMetadata, what: str) -> None:
        tail = common.num_tokens - common.num_actual_tokens
        for want_lse in self.lse_modes:
            step = layer.plan(common)
            assert_step(layer.forward(batch, step, num_padded_reqs=tail, want_lse=want_lse), batch, what)

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill"])
    def test_layers_by_plans(self, shape: str) -> None:
        """Layers of two kinds by their names, as an engine and every adapter have them, planned before it is known how
        many pages there will be."""
        batches = {"first": self.make_batch(self.make_spec(), shape)}
        batches["second"] = batches["first"]
        if self.serves(local := self.feature_spec(feature("window_15"))):
            batches["local"] = self.make_batch(local, shape)
        batch = batches["first"]
        cache = replace(batch.cache, num_pages=None)
        specs = {name: each.spec for name, each in batches.items()}
        plans = Plans(self.backend, specs, cache, limits_for(batch), batch.device)
        for name, each in batches.items():
            plans.bind(name, **each.weights)
        steps = plans.plan(batch.common())
        for name, each in batches.items():
            pool = each.fresh_pool()
            output = plans.forward(name, each.query, each.key, each.value, pool, steps)
            assert_step(Result(output, None, pool), each, f"layer {name}")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill"])
    @pytest.mark.parametrize("name", ["plain", "window_15"])
    def test_rows_and_tokens_of_padding(self, name: str, shape: str) -> None:
        """Rows of zero tokens, wherever they stand, and tokens that belong to no row, whose outputs are zeros."""
        for _, spec in self.served([feature(name)]):
            batch = self.make_batch(spec, shape)
            layer = make_layer(self.backend, batch, num_padded_reqs=TAIL)
            for seed, (idle_rows, tail) in enumerate(((3, TAIL), (1, 0), (0, TAIL))):
                common = engine_batch(batch, Random(f"{shape} {seed}"), idle_rows=idle_rows, tail=tail)
                self.check_engine_batch(layer, batch, common, f"{shape}, {idle_rows} idle rows, {tail} tokens of none")

    @pytest.mark.parametrize("name", [f.name for f in FEATURES])
    def test_pages_behind_a_row_are_not_read(self, name: str) -> None:
        """Nothing follows from what stands in a page table behind a row's own pages."""
        for _, spec in self.served([feature(name)]):
            batch = self.make_batch(spec, "mixed_small")
            layer = make_layer(self.backend, batch)
            self.check_engine_batch(layer, batch, engine_batch(batch, Random(name)), f"{name}, junk behind rows")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill"])
    def test_an_engine_that_writes_its_keys(self, shape: str) -> None:
        """Without slots the step brings nothing: what queries see is in the cache already."""
        batch = self.make_batch(self.make_spec(), shape)
        layer, pool = make_layer(self.backend, batch), batch.pool_after()
        step = layer.plan(engine_batch(batch, Random(shape), writes=False))
        assert pool is not None
        with layer.guards.watching():
            output = layer.impl.forward(batch.query, None, None, pool, step)
        assert_step(Result(output, None, pool), batch, f"{shape}, keys written by the engine")

    @pytest.mark.parametrize("query_len", [1, 9])
    def test_rows_of_one_list_of_pages(self, query_len: int) -> None:
        """A page table whose rows are one, with a stride of 0, as torch's `expand` makes them."""
        batch = self.make_batch(
            self.make_spec(), BatchShape(seq_lens=(2 * self.page_size + 5,), query_lens=(query_len,))
        )
        layer, own, count = make_layer(self.backend, batch, num_padded_reqs=3 * query_len), batch.common(), 3
        starts = torch.arange(count + 1, dtype=torch.int32, device="cpu") * query_len
        common = CommonAttentionMetadata.from_tensors(
            own.page_size, starts.to(batch.device), starts, own.seq_lens.repeat(count), own.seq_lens_cpu.repeat(count),
            own.page_table.expand(count, -1),
        )  # fmt: skip
        step = layer.state.begin_forward(layer.builder.build(0, common))
        query, pool = batch.query.repeat(count, 1, 1), batch.pool_after()
        for part in layer.impl.forward(query, None, None, pool, step).split(query_len):
            what = f"{count} rows of {query_len} tokens over one list of pages"
            assert_matches(Result(part, None, None), batch, what)

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill"])
    def test_slots_of_padding_among_a_rows_own(self, shape: str) -> None:
        """A token whose slot is -1 is not written: the cache has its key already. Nor is any other slot."""
        batch = self.make_batch(self.make_spec(), shape)
        layer = make_layer(self.backend, batch)
        for every in (2, 1):
            common = batch.common()
            common.slot_mapping[::every] = PAD_SLOT
            result = layer.forward(batch, layer.plan(common), kv_cache=batch.pool_after())
            assert_step(result, batch, f"{shape}, every {every}. token has no slot")

    @pytest.mark.parametrize("name", ["plain", "window_15", "sinks"])
    def test_graphs_over_an_engines_tensors(self, name: str) -> None:
        """Graphs read an engine's persistent tensors, or copies; rows of padding have no tokens and pages of junk. No
        context manager surrounds what is captured, and a clone's step serves an eager pass too."""
        for query_len, (_, spec) in product(self.query_lens, self.served([feature(name)])):
            batches = self.graph_batches(spec, query_len)
            for shared in (True, False):
                self.check_engine_graphs(batches, query_len, shared)

    @pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
    def test_graphs_over_an_engines_tensors_and_8_bits(self, cache_dtype: torch.dtype) -> None:
        """The same where keys are of 8 bits, for which a library may have other kernels."""
        for query_len in self.query_lens:
            spec = self.make_spec(cache_dtype=cache_dtype)
            if self.serves(spec, may_refuse=True):
                batches = self.graph_batches(spec, query_len, k_scale=0.5, v_scale=0.25)
                for shared in (True, False):
                    self.check_engine_graphs(batches, query_len, shared)

    def check_engine_graphs(self, batches: Sequence[Batch], query_len: int, shared: bool) -> None:
        layer = make_layer(self.backend, *batches, num_padded_reqs=ROWS * query_len)
        held = engine_tensors(ROWS, layer.state.limits.max_num_tokens, PAGES, self.device)
        layer.state.hold_graph_buffers(ROWS, held if shared else None)
        filler = _Filler(held)
        clone = layer.state.graph_clone(ROWS, query_len)
        assert (ROWS, query_len) in layer.state.graph_sizes
        filler(batches[0], ROWS, query_len)
        before = [tensor.clone() for tensor in vars(held).values()]
        layer.state.graph_capture_get_metadata_for_batch(ROWS, query_len)
        same = all(map(torch.equal, vars(held).values(), before))
        assert same, "metadata to capture with has changed an engine's own tensors"
        captured = CapturedStep([layer], clone, batches[:1], ROWS, query_len, make_recorder(self.device), filler)
        what = f"an engine's graph, tensors {'shared' if shared else 'copied'}, {query_len} tokens a row"
        self.check_replays(captured, [[batch] for batch in batches], what)
        self.check_replanned(layer, captured, batches, filler)
        captured.fill(batches[-1:])
        step = layer.state.step_for(layer.builder.build(0, filler(batches[-1], ROWS, query_len)))
        padded = ROWS * query_len - len(batches[-1].query)
        assert_matches(layer.forward(batches[-1], step, num_padded_reqs=padded), batches[-1], "a clone's step, eager")

    def check_replanned(self, layer: Layer, captured: CapturedStep, batches: Sequence[Batch], filler: _Filler) -> None:
        """A state that plans a captured size over the engine's tensors alone does so for every batch that is there,
        and gives the clone's own steps; where it does not, there is nothing to hold."""
        state, rows, query_len = layer.state, captured.num_rows, captured.query_len
        assert state.replanned(rows + 1, query_len) is None, "a size that was not captured was planned for"
        for batch in (*batches, batches[0]):
            captured.put_in([batch])
            common = filler(batch, rows, query_len)
            with layer.guards.watching(), forbid_host_reads(self.device, [vars(filler.held), state]):
                steps = state.replanned(rows, query_len)
            if steps is None:
                return
            (result,) = captured.replay()
            assert_matches(result, batch, f"planned over an engine's tensors alone, {query_len} tokens a row")
            again = state.step_for(layer.builder.build(0, common))
            assert steps[layer.builder.group.index] is again, "another step than the one that graphs were captured with"

    @pytest.mark.parametrize("name", ["plain", "window_15"])
    def test_a_size_is_made_over_a_batch_that_is_there(self, name: str) -> None:
        """A clone that the first batch of its size makes leaves that batch as it is, where graphs read an engine's
        tensors or a step table's."""
        for query_len, (_, spec) in product(self.query_lens, self.served([feature(name)])):
            batches = self.graph_batches(spec, query_len)
            layer = make_layer(self.backend, *batches, num_padded_reqs=ROWS * query_len)
            table = step_table(layer.state.limits, batches[0].cache, self.device)
            held = engine_tensors(ROWS, layer.state.limits.max_num_tokens, PAGES, self.device)
            for inputs, fill in ((held, _Filler(held)), (table.side.buffers, partial(batch_of_table, table))):
                layer.state.hold_graph_buffers(ROWS, inputs)
                for batch in batches[:3]:  # of three sizes
                    rows = len(batch.rows)
                    step = layer.state.step_for(layer.builder.build(0, fill(batch, rows, query_len)))
                    assert_matches(layer.forward(batch, step), batch, f"the first of {rows} rows, {query_len} each")


@dataclass
class _Filler:
    """Writes each batch into the engine's tensors, and makes it of views of these."""

    held: HeldTensors

    def __call__(self, batch: Batch, num_rows: int, query_len: int) -> CommonAttentionMetadata:
        own, held, rows = batch.common(), self.held, len(batch.rows)
        junk = Random(own.num_tokens).choice(JUNK_PAGES)
        table = torch.full(held.page_table.shape, junk, dtype=torch.int32, device="cpu")
        put_pages(table, range(rows), own)
        held.page_table.copy_(table)
        held.seq_lens.zero_()
        held.seq_lens[:rows] = own.seq_lens
        held.slot_mapping.fill_(PAD_SLOT)
        held.slot_mapping[: len(own.slot_mapping)] = own.slot_mapping
        starts = torch.full((num_rows + 1,), own.num_tokens, dtype=torch.int32, device="cpu")
        starts[: rows + 1] = own.query_start_loc_cpu
        lens_cpu = torch.zeros(num_rows, dtype=torch.int32, device="cpu")
        lens_cpu[:rows] = own.seq_lens_cpu
        return CommonAttentionMetadata.from_tensors(
            own.page_size, starts.to(batch.device), starts, held.seq_lens[:num_rows], lens_cpu,
            held.page_table[:num_rows], held.slot_mapping, num_tokens=num_rows * query_len, for_graph=True,
        )  # fmt: skip
