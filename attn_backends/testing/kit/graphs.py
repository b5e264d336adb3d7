"""CUDA graphs: what was captured once serves every batch that fits, and no earlier batch shows in a later one.

On a CPU the simulator records and replays, and poisons whatever a GPU might have reused in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from attn_backends.interface.capabilities import CudaGraphSupport
from attn_backends.spec import FP8_DTYPES, AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import CROSS, FEATURES, feature
from attn_backends.testing.graphs.harness import CapturedStep, capture, graph_batch, make_recorder, step_table
from attn_backends.testing.graphs.host_reads import forbid_host_reads
from attn_backends.testing.harness import Layer, assert_matches, assert_step, make_layer, make_layers
from attn_backends.testing.kit.base import KitBase

ROWS = 4
PAGES = 16  # one pool size for batches that share a graph
LENGTHS = ((40, 17, 33, 9), (3,), (16, 64), (50, 4, 48), (5, 6, 7, 8))  # small batches after large ones, and back


class Graphs(KitBase):
    """Cases of a backend that declares `Capabilities.cuda_graph`."""

    @property
    def longer(self) -> int:
        """How many times as long rows are where pages are longer than 16."""
        return max(1, self.page_size // 16)

    def graph_batches(self, spec: AttentionSpec, query_len: int, **how: Any) -> list[Batch]:
        """Batches of different rows over pools of one shape, the largest first.

        Their numbers of pages differ too, whatever the page size: schedules may depend on these alone.
        """
        shapes = [
            BatchShape(seq_lens=tuple(self.longer * length for length in lens), query_lens=(query_len,) * len(lens))
            for lens in LENGTHS
        ]
        batches = [
            self.make_batch(spec, shape, num_pages=PAGES, seed=i, poison=float("nan"), **how)
            for i, shape in enumerate(shapes)
        ]
        return [replace(batch, sinks=batches[0].sinks) for batch in batches]  # they are the layer's, not the batch's

    def capture(self, layers: Sequence[Layer], examples: Sequence[Batch], query_len: int = 1) -> CapturedStep:
        return capture(layers, examples, ROWS, query_len)

    def check_replays(self, captured: CapturedStep, batches: Sequence[Sequence[Batch]], what: str) -> None:
        for each in batches:
            for i, (result, batch) in enumerate(zip(captured.run(each), each, strict=True)):
                name = f"{what}, layer {i}, replay of {[row.data.seq_len for row in batch.rows]}"
                assert_step(result, batch, name)

    def check_graph(self, batches: Sequence[Batch], query_len: int, what: str) -> None:
        """One layer's graph, captured with the first batch, serves them all."""
        layer = make_layer(self.backend, *batches, num_padded_reqs=ROWS * query_len)
        captured = self.capture([layer], batches[:1], query_len)
        self.check_replays(captured, [[batch] for batch in batches], what)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens a row that graphs are declared for; none without graphs."""
        level = self.can.cuda_graph
        return (1, 3)[: 2 if level >= CudaGraphSupport.UNIFORM_BATCH else min(1, level)]

    @pytest.mark.parametrize("name", [f.name for f in FEATURES])
    def test_replays_equal_the_reference(self, name: str) -> None:
        for query_len, (_, spec) in product(self.query_lens, self.served([feature(name)])):
            self.check_graph(self.graph_batches(spec, query_len), query_len, f"{name} query_len={query_len}")

    @pytest.mark.parametrize("name", ["plain", "soft_cap", "sinks", "alibi", "window_15", "chunks_24"])
    def test_replays_with_scales(self, name: str) -> None:
        """A graph reads a float cache with the layer's scales, of keys and of values."""
        for query_len, (_, spec) in product(self.query_lens, self.served([feature(name)])):
            batches = self.graph_batches(spec, query_len, k_scale=0.3, v_scale=2.5)
            self.check_graph(batches[:3], query_len, f"{name} with scales")

    def test_replays_in_every_dtype(self, dtype: Any) -> None:
        for query_len in self.query_lens:
            self.check_graph(self.graph_batches(self.make_spec(dtype=dtype), query_len), query_len, str(dtype))

    @pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
    def test_replays_over_caches_of_8_bits(self, cache_dtype: torch.dtype) -> None:
        """Rows of padding among them: a kernel for 8 bits may be another than that for 16, and need other things."""
        for query_len in self.query_lens:
            spec = self.make_spec(cache_dtype=cache_dtype)
            if self.serves(spec, may_refuse=True):
                batches = self.graph_batches(spec, query_len, k_scale=0.5, v_scale=0.25)
                self.check_graph(batches, query_len, f"{cache_dtype} query_len={query_len}")

    @pytest.mark.parametrize("name", ["plain", "window_15"])
    def test_replays_over_a_step_table(self, name: str) -> None:
        """Graphs that are given a table's tensors may read them in place, and then serve its batches alone."""
        for query_len, (_, spec) in product(self.query_lens, self.served([feature(name)])):
            batches = self.graph_batches(spec, query_len)
            layer = make_layer(self.backend, *batches, num_padded_reqs=ROWS * query_len)
            table = step_table(layer.state.limits, batches[0].cache, self.device)
            captured = capture([layer], batches[:1], ROWS, query_len, table)
            self.check_replays(captured, [[batch] for batch in batches], f"of a table, query_len={query_len}")
            other = layer.builder.build(0, graph_batch(batches[0], ROWS, query_len))
            read = captured.clone.get_graph_input_buffers(other)["slot_mapping"]
            if read.data_ptr() == table.side.buffers.slot_mapping.data_ptr():
                with pytest.raises(ValueError, match="not of that table"):
                    captured.clone.begin_forward(other)

    def test_plan_groups_share_a_state(self) -> None:
        """Layers of different shapes and features in one graph: the state holds the largest need of all groups."""
        plain = self.make_spec()
        wider = self.make_spec(num_qo_heads=2 * plain.num_qo_heads, scale=0.5)
        windowed = [spec for _, spec in self.served([feature("window_15")])]
        specs = [*windowed, plain, wider]
        for _ in self.query_lens[:1]:
            each = list(zip(*(self.graph_batches(spec, 1) for spec in specs), strict=True))
            layers = make_layers(self.backend, each[0], *(batch for more in each for batch in more))
            self.check_replays(self.capture(layers, each[0]), each, "plan groups")

    def test_replays_of_cross_attention(self) -> None:
        """Beside self-attention in one graph: both kinds of layers have lengths and pages of their own."""
        for query_len, (_, spec) in product(self.query_lens, self.served([CROSS])):
            plain = self.graph_batches(self.make_spec(), query_len)
            cross = []  # encoders of lengths of their own, one of them empty; no row writes keys
            for i, other in enumerate(plain):
                lens = [self.longer * (7 * n % 61) for n in range(i, i + len(other.rows))]
                shape = BatchShape(seq_lens=tuple(lens), query_lens=(query_len,) * len(lens))
                how: dict[str, Any] = {"new_kv_lens": (0,) * len(lens), "num_pages": PAGES, "poison": float("nan")}
                cross.append(self.make_batch(spec, shape, seed=20 + i, **how))
            layers = make_layers(self.backend, [plain[0], cross[0]], *plain, *cross, num_padded_reqs=ROWS * query_len)
            batch = graph_batch(cross[0], ROWS, query_len)
            if not layers[1].builder.can_run_in_cudagraph(batch):
                with pytest.raises(ValueError, match="graph"):
                    layers[1].builder.build(0, batch)
                continue
            each = list(zip(plain, cross, strict=True))
            captured = self.capture(layers, each[0], query_len)
            self.check_replays(captured, each, f"self-attention and cross attention, query_len={query_len}")

    def test_a_first_step_of_cross_attention_is_no_graphs(self) -> None:
        """It writes an encoder's keys, as many as there are: that is for eager steps."""
        for query_len in self.query_lens[:1]:
            for _, spec in self.served([CROSS]):
                shape = BatchShape(seq_lens=(9, 20), query_lens=(query_len,) * 2)
                batch = self.make_batch(spec, shape)
                builder = make_layer(self.backend, batch, num_padded_reqs=ROWS).builder
                assert not builder.can_run_in_cudagraph(graph_batch(batch, ROWS, query_len))
                with pytest.raises(ValueError, match="graph"):
                    builder.build(0, graph_batch(batch, ROWS, query_len))

    def test_sizes_share_a_state(self) -> None:
        """Graphs of two sizes, replayed in turns."""
        for _ in self.query_lens[:1]:
            batches = self.graph_batches(self.make_spec(), 1)
            layer = make_layer(self.backend, *batches)
            small = [batch for batch in batches if len(batch.rows) <= 2]
            recorder = make_recorder(self.device)
            with layer.state.graph_capture(ROWS):
                steps = [
                    CapturedStep([layer], layer.state.graph_clone(rows), batches[1:2], rows, 1, recorder)
                    for rows in (ROWS, 2)
                ]
            for first, second in zip(batches, small * 3, strict=False):
                self.check_replays(steps[0], [[first]], "the larger size")
                self.check_replays(steps[1], [[second]], "the smaller size")

    def test_eager_steps_between_replays(self) -> None:
        """Prompts and decodes through the state whose clone was captured: before that, and between replays."""
        for _ in self.query_lens[:1]:
            spec = self.make_spec()
            batches = self.graph_batches(spec, 1)
            mixed = BatchShape(seq_lens=(50 * self.longer, 5, 40 * self.longer, 20), query_lens=(1, 1, 9, 20))
            eager = [*batches[:1], self.make_batch(spec, mixed, num_pages=PAGES, seed=9, poison=float("nan"))]
            layer = make_layer(self.backend, *batches, *eager, num_padded_reqs=ROWS)
            for batch in eager:
                assert_matches(layer.forward(batch, layer.begin(batch)), batch, "before the capture")
            captured = self.capture([layer], batches[:1])
            for batch in batches:
                for other in eager:
                    assert_matches(layer.forward(other, layer.begin(other)), other, "between replays")
                self.check_replays(captured, [[batch]], "behind eager steps")

    def test_verbs(self) -> None:
        """Metadata without a batch, the buffers by name, and a fill that `begin_forward` repeats."""
        for query_len in self.query_lens:
            batch = self.graph_batches(self.make_spec(), query_len)[0]
            layer = make_layer(self.backend, batch, num_padded_reqs=ROWS * query_len)
            with layer.state.graph_capture(ROWS):
                clone = layer.state.graph_clone(ROWS, query_len)
                idle = layer.state.graph_capture_get_metadata_for_batch(ROWS, query_len)
            assert type(idle) is self.backend.get_metadata_cls()
            metadata = layer.builder.build(0, graph_batch(batch, ROWS, query_len))
            buffers = clone.get_graph_input_buffers(metadata)
            addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
            clone.prepare_graph_input_buffers(buffers, metadata)
            filled = {name: buffer.clone() for name, buffer in buffers.items()}
            clone.begin_forward(idle)
            clone.begin_forward(metadata)
            again = clone.get_graph_input_buffers(metadata)
            assert buffers, "a captured graph reads no persistent tensor"
            assert {name: buffer.data_ptr() for name, buffer in again.items()} == addresses
            for name, buffer in again.items():
                assert buffer.equal(filled[name]), f"begin_forward fills {name} with something else"

    def test_graph_limits(self) -> None:
        """Sizes above the limits, sizes of nothing, and growth after capture are refused by name."""
        for _ in self.query_lens[:1]:
            layer = make_layer(self.backend, self.graph_batches(self.make_spec(), 1)[0])
            state = layer.state
            for size, query_len in ((ROWS + 1, 1), (ROWS, 2), (0, 1), (1, 0)):
                with state.graph_capture(ROWS), pytest.raises(ValueError, match=f"{size} rows of {query_len} tokens"):
                    state.graph_clone(size, query_len)
            with pytest.raises(ValueError, match=f"{ROWS + 1} rows"):
                state.graph_capture(ROWS + 1).__enter__()
            with pytest.raises(RuntimeError, match="graph_capture"):
                state.graph_clone(2)
            with state.graph_capture(ROWS - 1), pytest.raises(RuntimeError, match=f"graph_capture.{ROWS}"):
                state.graph_clone(ROWS)

    def test_filling_reads_nothing_from_the_device(self) -> None:
        for query_len in self.query_lens:
            batches = self.graph_batches(self.make_spec(), query_len)
            layer = make_layer(self.backend, *batches, num_padded_reqs=ROWS * query_len)
            with layer.state.graph_capture(ROWS):
                clone = layer.state.graph_clone(ROWS, query_len)
            common = graph_batch(batches[0], ROWS, query_len)
            with forbid_host_reads(self.device, [common, clone]):
                clone.begin_forward(layer.builder.build(0, common))

    def test_a_batch_of_another_shape_is_refused(self) -> None:
        """One of as many tokens, in other rows."""
        if self.can.cuda_graph < CudaGraphSupport.UNIFORM_BATCH:
            return
        shapes = {num_rows: (6 // num_rows,) * num_rows for num_rows in (2, 3, 6)}
        given = [
            self.make_batch(self.make_spec(), BatchShape(seq_lens=(9,) * num_rows, query_lens=query_lens))
            for num_rows, query_lens in shapes.items()
        ]
        layer = make_layer(self.backend, *given, num_padded_reqs=ROWS)
        with layer.state.graph_capture(6):
            clones = {num_rows: layer.state.graph_clone(num_rows, 6 // num_rows) for num_rows in shapes}
        for captured, clone in clones.items():
            for num_rows, batch in zip(shapes, given, strict=True):
                metadata = layer.builder.build(0, graph_batch(batch, num_rows, 6 // num_rows))
                if num_rows == captured:
                    clone.begin_forward(metadata)
                else:
                    with pytest.raises(ValueError, match="captured"):
                        clone.begin_forward(metadata)

    def test_a_batch_of_another_size_is_refused(self) -> None:
        for _ in self.query_lens[:1]:
            batch = self.graph_batches(self.make_spec(), 1)[1]
            layer = make_layer(self.backend, batch, num_padded_reqs=ROWS)
            with layer.state.graph_capture(ROWS):
                clone = layer.state.graph_clone(ROWS)
            with pytest.raises(ValueError, match="captured"):
                clone.begin_forward(layer.builder.build(0, graph_batch(batch, ROWS - 1, 1)))
            with pytest.raises(ValueError, match="for_graph"):
                clone.begin_forward(layer.builder.build(0, replace(graph_batch(batch, ROWS, 1), for_graph=False)))
