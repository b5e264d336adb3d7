"""CUDA graphs of mixed batches: what was captured once for a number of tokens serves rows of any query lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.interface.capabilities import CudaGraphSupport, Unsupported
from attn_backends.spec import FP8_DTYPES, AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import CROSS, FEATURES, feature
from attn_backends.testing.graphs.harness import CapturedStep, make_recorder
from attn_backends.testing.graphs.host_reads import forbid_host_reads
from attn_backends.testing.graphs.mixed import MixedFiller, capture_mixed, engine_tensors
from attn_backends.testing.harness import Layer, assert_matches, assert_step, make_layer, make_layers
from attn_backends.testing.kit.engines import Engines
from attn_backends.testing.kit.graphs import PAGES

MIXED_ROWS, MIXED_TOKENS = 6, 24
MIXED_BATCHES = (  # keys in the cache, and query tokens, of each row
    ((39, 1), (0, 17), (27, 3), (32, 1)),  # decodes, a prompt, and tokens to verify
    ((49, 1), (8, 1)),  # decodes alone
    ((0, 24),),  # one prompt of all tokens
    ((35, 9), (59, 1), (11, 8)),  # chunks behind a prefix, around a decode
    ((4, 1),),
    ((0, 12), (0, 11)),
    ((5, 4),) * 6,  # all rows
)


class Mixed(Engines):
    """Cases of a backend that declares `CudaGraphSupport.ALWAYS`; another one has to refuse such graphs by name."""

    def mixed_specs(self, names: Sequence[str], **changes: Any) -> list[AttentionSpec]:
        """Layers of the features that are served, where the backend has graphs of mixed batches."""
        if self.can.cuda_graph < CudaGraphSupport.ALWAYS:
            return []
        return [spec for _, spec in self.served([feature(name) for name in names], **changes)]

    def mixed_batches(self, spec: AttentionSpec, count: int = len(MIXED_BATCHES), **how: Any) -> list[Batch]:
        """Batches over pools of one shape, with poison wherever nothing is to be read."""
        batches = []
        for seed, rows in enumerate(MIXED_BATCHES[:count]):
            seq_lens = tuple(self.longer * context + query_len for context, query_len in rows)
            shape = BatchShape(seq_lens=seq_lens, query_lens=tuple(query_len for _, query_len in rows))
            how = {"num_pages": PAGES, "seed": seed, "poison": float("nan"), **how}
            batches.append(self.make_batch(spec, shape, **{**how, "seed": seed}))
        return [replace(batch, sinks=batches[0].sinks) for batch in batches]

    def capture_mixed(
        self, layer: Layer, batches: Sequence[Batch], shared: bool, size: tuple[int, int] = (MIXED_ROWS, MIXED_TOKENS)
    ) -> CapturedStep:
        """Capture with the first batch, over the engine's tensors or over copies of them."""
        held = engine_tensors(MIXED_ROWS, MIXED_TOKENS, PAGES, self.device)
        return capture_mixed([layer], batches[:1], held, size, shared)

    def check_mixed(self, batches: Sequence[Batch], what: str, shared: bool = True) -> None:
        """One graph serves them all, one after the other, and again the first."""
        layer = make_layer(self.backend, *batches, num_padded_reqs=MIXED_ROWS)
        captured = self.capture_mixed(layer, batches, shared)
        for batch in (*batches, batches[0]):
            (result,) = captured.run([batch])
            assert_step(result, batch, f"{what}, a mixed graph's replay of {told(batch)}")

    @pytest.mark.parametrize("name", [f.name for f in FEATURES])
    def test_mixed_replays_equal_the_reference(self, name: str) -> None:
        for spec in self.mixed_specs([name]):
            self.check_mixed(self.mixed_batches(spec), name)

    @pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
    def test_mixed_replays_over_caches_of_8_bits(self, cache_dtype: torch.dtype) -> None:
        for spec in self.mixed_specs(["plain"]):
            narrow = replace(spec, cache_dtype=cache_dtype)
            if self.serves(narrow, may_refuse=True):
                self.check_mixed(self.mixed_batches(narrow, k_scale=0.5, v_scale=0.25), str(cache_dtype))

    def test_mixed_replays_in_every_dtype(self, dtype: Any) -> None:
        for spec in self.mixed_specs(["plain"], dtype=dtype):
            self.check_mixed(self.mixed_batches(spec), str(dtype), shared=False)

    @pytest.mark.parametrize("name", ["plain", "window_15"])
    def test_mixed_replays_are_planned_over_an_engines_tensors(self, name: str) -> None:
        """Without a batch, if the state can; its step serves an eager pass too, and gives the LSE there."""
        for spec in self.mixed_specs([name]):
            batches = self.mixed_batches(spec)
            layer = make_layer(self.backend, *batches, num_padded_reqs=MIXED_ROWS)
            captured, size = self.capture_mixed(layer, batches, True), (MIXED_ROWS, MIXED_TOKENS)
            assert layer.state.replanned_mixed(MIXED_ROWS, MIXED_TOKENS - 1) is None
            for batch in batches:
                captured.put_in([batch])
                common = captured.make_common(batch, MIXED_ROWS, 0)
                with layer.guards.watching(), forbid_host_reads(self.device, [common, layer.state]):
                    steps = layer.state.replanned_mixed(*size)
                if steps is not None:
                    (result,) = captured.replay()
                    assert_step(result, batch, f"planned over an engine's tensors alone, {told(batch)}")
                step = layer.state.step_for(layer.builder.build(0, common))
                padded = MIXED_TOKENS - len(batch.query)
                for want_lse in self.lse_modes:
                    result = layer.forward(batch, step, num_padded_reqs=padded, want_lse=want_lse)
                    assert_step(result, batch, f"a mixed graph's step, eager, {told(batch)}")

    def test_mixed_graphs_beside_others(self) -> None:
        """Two sizes, a graph of decodes and eager steps share a state, in turns."""
        for spec in self.mixed_specs(["plain"]):
            batches, decodes = self.mixed_batches(spec), self.graph_batches(spec, 1)
            small = [batch for batch in batches if len(batch.rows) <= 2 and len(batch.query) <= 12]
            layer = make_layer(self.backend, *batches, *decodes, num_padded_reqs=MIXED_ROWS)
            steps = [self.capture_mixed(layer, given, False, size)
                     for given, size in ((batches, (MIXED_ROWS, MIXED_TOKENS)), (small, (2, 12)))]  # fmt: skip
            uniform = self.capture([layer], decodes[:1])
            for nth, batch in enumerate(batches):
                given = [(steps[0], batch), (uniform, decodes[nth % len(decodes)]), (steps[1], small[nth % len(small)])]
                for captured, each in given:
                    self.check_replays(captured, [[each]], "mixed graphs beside others")
                assert_matches(layer.forward(batch, layer.begin(batch)), batch, "eager between replays")

    def test_mixed_replays_of_cross_attention(self) -> None:
        """Beside self-attention: query lengths are the same, and keys an encoder's, of any number."""
        for cross_spec in self.mixed_specs([CROSS.name]):
            plain, cross = self.mixed_batches(self.make_spec()), []
            for i, other in enumerate(plain):
                lens = tuple(self.longer * (7 * n % 40) for n in range(i, i + len(other.rows)))
                shape = BatchShape(seq_lens=lens, query_lens=tuple(row.data.query_len for row in other.rows))
                how: dict[str, Any] = {"new_kv_lens": (0,) * len(lens), "num_pages": PAGES, "poison": float("nan")}
                cross.append(self.make_batch(cross_spec, shape, seed=20 + i, **how))
            each = list(zip(plain, cross, strict=True))
            layers = make_layers(self.backend, each[0], *plain, *cross, num_padded_reqs=MIXED_ROWS)
            layers[0].state.hold_graph_buffers(MIXED_ROWS)
            held, of_cross = (engine_tensors(MIXED_ROWS, MIXED_TOKENS, PAGES, self.device) for _ in range(2))
            clone = layers[0].state.mixed_graph_clone(MIXED_ROWS, MIXED_TOKENS)
            captured = CapturedStep(
                layers, clone, each[0], MIXED_ROWS, 0, make_recorder(self.device),
                partial(_filled, held, of_cross), MIXED_TOKENS,
            )  # fmt: skip
            self.check_replays(captured, each, "self-attention and cross attention in a mixed graph")

    def test_filling_a_mixed_graph_reads_nothing_from_the_device(self) -> None:
        for spec in self.mixed_specs(["plain"]):
            batches = self.mixed_batches(spec, 2)
            layer = make_layer(self.backend, *batches, num_padded_reqs=MIXED_TOKENS)
            captured = self.capture_mixed(layer, batches, False)
            common = captured.make_common(batches[1], MIXED_ROWS, 0)
            with forbid_host_reads(self.device, [common, captured.clone]):
                captured.clone.begin_forward(layer.builder.build(0, common))

    def test_mixed_graphs_have_their_sizes(self) -> None:
        """Other sizes are refused, and rows of equal lengths that are as many of as many tokens; all mixed graphs where
        they are not declared."""
        spec = self.make_spec()
        batch = self.make_batch(spec, BatchShape(seq_lens=(9,) * MIXED_ROWS, query_lens=(4,) * MIXED_ROWS))
        layer = make_layer(self.backend, batch)
        if self.can.cuda_graph < CudaGraphSupport.ALWAYS:
            with pytest.raises(Unsupported, match="cuda_graph"):
                layer.state.mixed_graph_clone(2, 4)
            return
        captured = self.capture_mixed(layer, [batch], False)
        for size in ((MIXED_ROWS + 1, 1), (1, MIXED_TOKENS + 1), (0, 1), (1, 0)):
            with pytest.raises(ValueError, match="a graph of"):
                layer.state.mixed_graph_clone(*size)
        with layer.state.graph_capture(2), pytest.raises(RuntimeError, match=r"graph_capture.3"):
            layer.state.mixed_graph_clone(3, 4)
        mixed = captured.make_common(batch, MIXED_ROWS, 0)
        equal = replace(mixed, is_mixed=False)
        with layer.state.graph_capture(MIXED_ROWS):
            uniform = layer.state.graph_clone(MIXED_ROWS, 4)
        for clone, other in ((captured.clone, equal), (uniform, mixed)):
            with pytest.raises(ValueError, match="captured"):
                clone.begin_forward(layer.builder.build(0, other))


def _filled(held: HeldTensors, of_cross: HeldTensors, batch: Batch, *size: int) -> CommonAttentionMetadata:
    """Fill the tensors of self-attention with a batch that brings keys, and those of cross attention with others."""
    return MixedFiller(held if len(batch.key) else of_cross, MIXED_TOKENS)(batch, *size)


def told(batch: Batch) -> list[tuple[int, int]]:
    """Keys in the cache and query tokens of each row."""
    return [(row.data.context_len, row.data.query_len) for row in batch.rows]
