"""Slots and pages that a cache does not have: the kernels in C refuse them before anything is written."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Layer, Result, assert_pool, assert_step, make_layer, output_error

DECODES, PROMPTS, MIXED = ((1, 1, 1), (9, 40, 23), (1, 1, 30))


def drawn(numbers: random.Random, window_left: int = -1, page_sizes: tuple[int, ...] = (4, 16)) -> Batch:
    spec = AttentionSpec(4, 2, 32, window_left=window_left)
    query_lens = numbers.choice((DECODES, PROMPTS, MIXED))
    seq_lens = tuple(query_len + numbers.randrange(60) for query_len in query_lens)
    return random_batch(TorchBackend, spec, seq_lens, query_lens, page_size=numbers.choice(page_sizes))


def refuses(layer: Layer, batch: Batch, told: str, **changes: torch.Tensor) -> None:
    """A step of a batch so changed is refused by name, and writes nothing, but for decodes before prefills."""
    pool = batch.fresh_pool()
    step = layer.state.begin_forward(layer.builder.build(0, replace(batch.common(), **changes)))
    with pytest.raises(IndexError, match=told):
        layer.impl.forward(batch.query, batch.key, batch.value, pool, step)
    if len({row.data.query_len > 1 for row in batch.rows}) == 1:
        assert_pool(pool, batch.pool, "refused")


@pytest.mark.parametrize("seed", range(40))
def test_what_the_cache_does_not_have_is_refused(seed: int) -> None:
    numbers = random.Random(seed)
    batch = drawn(numbers)
    layer, common = make_layer(TorchBackend, batch), batch.common()
    table, slots, pages = common.page_table, common.slot_mapping, batch.cache.pages
    row = numbers.randrange(3)
    page = numbers.randrange(-(-batch.rows[row].data.seq_len // batch.cache.page_size))
    for wrong in (pages, pages + numbers.randrange(1 << 30), -1, -(1 << 31)):
        other = table.clone()
        other[row, page] = wrong
        refuses(layer, batch, "page_table has a page that the cache does not", page_table=other)
    for wrong in (batch.cache.num_slots, batch.cache.num_slots + numbers.randrange(1 << 40)):
        other = slots.clone()
        other[numbers.randrange(len(slots))] = wrong
        refuses(layer, batch, "slot_mapping has a slot behind", slot_mapping=other)
    longer = common.seq_lens.clone()
    longer[-1] = 3 * table.shape[1] * batch.cache.page_size
    refuses(layer, batch, "or fewer than seq_lens needs", seq_lens=longer)


@pytest.mark.parametrize("seed", range(40))
def test_what_no_query_sees_may_be_anything(seed: int) -> None:
    """Behind a row's end, and before its window: there engines have freed the pages."""
    numbers = random.Random(seed)
    batch = drawn(numbers, window_left=numbers.choice((0, 3, 20)))
    layer, common, page_size = make_layer(TorchBackend, batch), batch.common(), batch.cache.page_size
    table = torch.nn.functional.pad(common.page_table, (0, 2), value=-7)
    for i, row in enumerate(batch.rows):
        first = max(0, row.data.seq_len - row.data.query_len - batch.spec.window_left)
        table[i, : first // page_size] = 1 << 30
        table[i, -(-row.data.seq_len // page_size) :] = -numbers.randrange(1, 99)
    step = layer.state.begin_forward(layer.builder.build(0, replace(common, page_table=table)))
    pool = batch.fresh_pool()
    output = layer.impl.forward(batch.query, batch.key, batch.value, pool, step)
    assert_step(Result(output, None, pool), batch, "pages that no query sees")


@pytest.mark.parametrize("seed", range(20))
def test_a_row_without_keys_has_no_pages(seed: int) -> None:
    """However many tokens it has, as padding may: pages in front of its own, where its tokens would stand, are others',
    and may be anything behind these rows' ends."""
    numbers = random.Random(f"no keys {seed}")
    batch = drawn(numbers, page_sizes=(1, 4))
    layer, common, page_size = make_layer(TorchBackend, batch), batch.common(), batch.cache.page_size
    table = torch.nn.functional.pad(common.page_table, (9, 9), value=-7)[:, 9:]
    for i, row in enumerate(batch.rows[:-1]):
        table[i, -(-row.data.seq_len // page_size) :] = -7
    table[-1], lens, slots = -7, common.seq_lens.clone(), common.slot_mapping.clone()
    num_live = len(slots) - batch.rows[-1].data.query_len
    lens[-1], slots[num_live:] = 0, -1
    changes = {"page_table": table, "seq_lens": lens, "seq_lens_cpu": lens, "slot_mapping": slots}
    step = layer.state.begin_forward(layer.builder.build(0, replace(common, **changes)))
    output = layer.impl.forward(batch.query, batch.key, batch.value, batch.fresh_pool(), step)
    assert output_error(output[:num_live], batch.expected()[0][:num_live]) <= batch.tolerance
    assert not output[num_live:].any()
