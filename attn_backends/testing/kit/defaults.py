"""Torch's defaults, which frameworks set while they make a model: no number and no place of a tensor follows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import feature
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import assert_step, make_layer
from attn_backends.testing.kit.base import WHOLE_PROMPTS
from attn_backends.testing.kit.graphs import Graphs

Default = torch.dtype | str
# A device that holds no numbers stands for any that is not the layer's: what was made there cannot be read.
DEFAULTS: tuple[Default, ...] = (torch.bfloat16, torch.float64, "meta")
SCALES = {"k_scale": 0.37, "v_scale": 1.9}  # bfloat16 has neither
PADDED_ROWS = 2

under_every_default = pytest.mark.parametrize("default", DEFAULTS, ids=str)


@contextmanager
def torch_default(default: Default) -> Iterator[None]:
    """New tensors have this dtype, or are on this device, where a call does not name another."""
    if isinstance(default, str):
        with torch.device(default):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Defaults(Graphs):
    """A layer that is bound, planned for and run under another default of torch gives what it gives without."""

    def check_under(self, default: Default, batch: Batch, what: str, common_prefix_len: int = 0) -> None:
        expected, pool, how = batch.expected(), batch.pool_after(), (common_prefix_len, PADDED_ROWS)
        plain = make_layer(self.backend, batch, num_padded_reqs=PADDED_ROWS)
        before = snapshot(plain.builder.build(common_prefix_len, batch.common(PADDED_ROWS)))
        for want_lse in self.lse_modes:
            name = f"{what} under a default of {default}{' with lse' if want_lse else ''}"
            with torch_default(default):
                layer = make_layer(self.backend, batch, num_padded_reqs=PADDED_ROWS)
                step = layer.begin(batch, *how)
                result = layer.forward(batch, step, num_padded_reqs=PADDED_ROWS, want_lse=want_lse)
            assert_step(result, batch, name, expected, pool)
            found = differences(before, snapshot(step.metadata))
            assert not found, f"{name}: the metadata differs in {found}"

    @under_every_default
    @pytest.mark.parametrize("name", ["plain", "alibi", "sinks"])
    def test_defaults_of_torch(self, name: str, default: Default) -> None:
        for _, spec in self.served([feature(name)]):
            for shape in ("mixed_small", "small_decode")[: 2 if name == "plain" else 1]:
                self.check_under(default, self.make_batch(spec, shape, **SCALES), f"{name} {shape}")

    @under_every_default
    def test_defaults_of_torch_over_a_cache_of_8_bits(self, default: Default) -> None:
        spec = self.make_spec(cache_dtype=torch.float8_e4m3fn)
        if self.serves(spec, may_refuse=True):
            batch = self.make_batch(spec, "mixed_small", **SCALES)
            self.check_under(default, batch, "a cache of 8 bits")

    @under_every_default
    def test_defaults_of_torch_without_a_cache(self, default: Default) -> None:
        batch = self.make_batch(self.make_spec(), WHOLE_PROMPTS, cached=False)
        self.check_under(default, batch, "a profile run")

    @under_every_default
    def test_defaults_of_torch_with_a_shared_prefix(self, default: Default) -> None:
        prefix = 4 * self.page_size
        shape = BatchShape(seq_lens=tuple(prefix + n for n in (1, 9, 30, 20)), query_lens=(1, 1, 1, 12))
        batch = self.make_batch(self.make_spec(), shape, shared_prefix_len=prefix)
        self.check_under(default, batch, "a shared prefix", prefix)

    @under_every_default
    def test_defaults_of_torch_in_graphs(self, default: Default) -> None:
        for query_len in self.query_lens:
            batches = self.graph_batches(self.make_spec(), query_len)[:2]
            with torch_default(default):
                layer = make_layer(self.backend, *batches, num_padded_reqs=len(batches[0].rows) * query_len)
                captured = self.capture([layer], batches[:1], query_len)
                results = [captured.run([batch])[0] for batch in batches]
            for batch, result in zip(batches, results, strict=True):
                assert_step(result, batch, f"a graph under a default of {default}, query_len={query_len}")
