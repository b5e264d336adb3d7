"""Logits far from zero, with which rows are still rows with keys: outputs, LSEs, sinks and merges stay right.

All keys of a row have one of two logits, and the lower one weighs nothing, so that what is right does not hang on how
precise a large logit is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch, MLABatch, Row
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import CROSS, Feature, feature
from attn_backends.testing.cases.random_batch import with_pool
from attn_backends.testing.harness import Result, lse_error, make_layer, output_error, run_backend
from attn_backends.testing.kit.base import WHOLE_PROMPTS
from attn_backends.testing.kit.graphs import Graphs

LEVELS = (-(2.0**16), -(2.0**14), 2.0**14, 2.0**16)  # of the logits, in natural units; others are twice as far from 0
SCALES = (8.0, 0.125)  # of the layer: q·k before it is nearer to 0 than the logit, or further away
QUERY = 4.0  # every element of a query
ULPS = 2.0**-22  # what a logit is off by in float32, relative, in base 2 and after a few sums
PREFIX_PAGES = 2

Doubled = Callable[[torch.Tensor], torch.Tensor]  # which positions have keys of twice the level


def every_second(positions: torch.Tensor) -> torch.Tensor:
    return positions % 2 == 1


def levelled(batch: Batch, level: float, doubled: Doubled) -> Batch:
    """The batch with logits of `level`, and of twice that at some positions."""
    is_latent = isinstance(batch, MLABatch)
    size = batch.rows[0].value.shape[-1] if is_latent else batch.spec.head_dim
    step = level / (batch.spec.scale * batch.k_scale * QUERY * size)

    def row_of(row: Row) -> Row:
        query = torch.full_like(row.query, QUERY)
        shape = row.value.shape if is_latent else row.key.shape
        factors = 1.0 + doubled(torch.arange(shape[0], device="cpu")).float()
        keys = (step * factors).view(-1, *[1] * (len(shape) - 1)).expand(shape).to(row.key.dtype)
        if is_latent:  # the shared key alone makes logits
            query[..., : -shape[-1]] = 0
            return replace(row, query=query, value=keys)
        return replace(row, query=query, key=keys)

    return replace(batch, rows=tuple(map(row_of, batch.rows)))


class Logits(Graphs):
    def levels(self, spec: AttentionSpec) -> list[float]:
        """The logits that the backend does not declare to be too low for it."""
        lowest = self.can.lowest_logit
        return [level for level in LEVELS if 2 * min(level, level / spec.scale) > lowest]

    def check_level(self, batch: Batch, result: Result, level: float, what: str) -> None:
        out, lse = batch.expected()
        allowed = max(batch.tolerance, 2 * abs(level) * ULPS)
        error = output_error(result.output, out)
        assert error <= allowed, f"{what}: output is off by {error:.2e} (relative, worst token); allowed {allowed:.0e}"
        if result.lse is not None:
            error = lse_error(result.lse, lse)
            assert error <= batch.tolerance, f"{what}: lse is off by {error:.2e} of {lse.flatten()[:4].tolist()}"

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize(
        "asked", [feature("plain"), feature("sinks"), feature("window_15"), CROSS], ids=lambda asked: asked.name
    )
    def test_logits_far_from_zero(self, asked: Feature, scale: float) -> None:
        """A row whose logits are very low sees its keys all the same; sinks weigh what they should, beside the logits
        and far from them, where one of both is all there is."""
        shapes: list[BatchShape | str] = ["small_decode", "mixed_small", WHOLE_PROMPTS]
        if asked is CROSS:
            shapes = [BatchShape(seq_lens=(40, 7, 0, 33), query_lens=(1, 1, 2, 4))]  # one without keys
        for _, spec in self.served([asked], scale=scale):
            for level in self.levels(spec):
                top = level * (2 if level > 0 else 1)
                for shape, raised in product(shapes, (top, 0.0) if spec.sinks else (0.0,)):
                    batch = levelled(self.make_batch(spec, shape), level, every_second)
                    sinks = None if batch.sinks is None else batch.sinks + raised
                    batch = with_pool(replace(batch, sinks=sinks), self.backend, float("nan"))
                    for want_lse in self.lse_modes:
                        result = run_backend(self.backend, batch, want_lse=want_lse)
                        self.check_level(batch, result, level, f"{asked.name}, logits of {level}, {shape}")

    @pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
    def test_maxima_of_other_tiles(self, late: bool, dtype: torch.dtype) -> None:
        """What a kernel has of earlier keys weighs nothing beside a later one, and later keys nothing beside those."""
        shape = BatchShape(seq_lens=(300, 290), query_lens=(1, 40))
        for _, spec in self.served([feature("plain")], dtype=dtype):
            for level in (level for level in self.levels(spec) if level > 0):
                batch = levelled(self.make_batch(spec, shape), level, lambda positions: (positions >= 200) == late)
                result = run_backend(self.backend, with_pool(batch, self.backend, float("nan")))
                self.check_level(batch, result, level, f"{'late' if late else 'early'} logits of {2 * level}")

    @pytest.mark.parametrize("where", ["every second key", "the prefix", "behind the prefix"])
    @pytest.mark.parametrize("name", ["plain", "sinks"])
    def test_merges_of_logits_far_from_zero(self, name: str, where: str) -> None:
        """A shared prefix and what joins it, of which either may weigh nothing."""
        prefix = PREFIX_PAGES * self.page_size
        shape = BatchShape(seq_lens=tuple(prefix + n for n in (1, 9, 20)), query_lens=(1, 1, 12))
        doubled: dict[str, Doubled] = {
            "every second key": every_second,
            "the prefix": lambda positions: positions < prefix,
            "behind the prefix": lambda positions: positions >= prefix,
        }
        for _, spec in self.served([feature(name)], scale=SCALES[0]):
            for level in self.levels(spec):
                shared = self.make_batch(spec, shape, shared_prefix_len=prefix)
                batch = with_pool(levelled(shared, level, doubled[where]), self.backend, float("nan"))
                for want_lse in self.lse_modes:
                    result = run_backend(self.backend, batch, common_prefix_len=prefix, want_lse=want_lse)
                    self.check_level(batch, result, level, f"{name}, shared prefix, {where} of {2 * level}")

    def test_replays_of_logits_far_from_zero(self) -> None:
        """In a graph with padded rows; sinks weigh nothing beside the keys, unless these are taken for none."""
        for query_len, (_, spec) in product(self.query_lens, self.served([feature("sinks")], scale=SCALES[0])):
            for level in self.levels(spec):
                given = self.graph_batches(spec, query_len)[:2]
                assert given[0].sinks is not None
                sinks = given[0].sinks + min(level, 2 * level) - 100
                changed = [replace(levelled(each, level, every_second), sinks=sinks) for each in given]
                batches = [with_pool(each, self.backend) for each in changed]
                layer = make_layer(self.backend, *batches, num_padded_reqs=len(batches[0].rows) * query_len)
                captured = self.capture([layer], batches[:1], query_len)
                for each in batches:
                    for result in captured.run([each]):
                        live = replace(result, output=result.output[: len(each.query)], lse=None)
                        self.check_level(each, live, level, f"a replay of logits of {level}")
