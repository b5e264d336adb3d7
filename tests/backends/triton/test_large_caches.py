"""TRITON and TRITON_MLA over caches of 2^32 elements, interpreted: of addresses alone, which take no memory.

And over as many elements of queries and outputs.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

from attn_backends import AttentionSpec, MLASpec, get_backend
from attn_backends.cache.kv_cache import gather_slots
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Result, assert_matches, make_layer, run_backend
from tests.helpers.interpreted import interpreted, only_interpreted
from tests.helpers.placed_caches import far_apart, in_large_cache

launch = pytest.importorskip("attn_backends.backends.triton.launch", reason="needs triton")
block_dims = pytest.importorskip("attn_backends.backends.triton.tuning").block_dims

ROWS = {  # lengths, and their query tokens
    "short": ([20, 33, 64], [1, 2, 1]), "long": ([150, 90, 40], [1, 1, 3]), "prefill": ([150, 90, 33], [30, 90, 17]),
}  # fmt: skip

test_interpreted, test_more_interpreted = interpreted(__file__)


@only_interpreted
@pytest.mark.parametrize("seed", range(24))
def test_right(seed: int) -> None:
    dice = Random(f"large caches {seed}")
    dtype, cached = dice.choice((torch.float16, torch.float32)), dice.choice((None, torch.float8_e5m2))
    seen = dice.choice(({}, {}, {"window_left": 50}))
    check(
        "TRITON", AttentionSpec(4, 2, 64, dtype=dtype, cache_dtype=cached, **seen), *dice.choice([*ROWS.values()]), dice
    )


@only_interpreted
@pytest.mark.parametrize("seed", range(12))
def test_latent_rows(seed: int) -> None:
    dice = Random(f"large latent caches {seed}")
    dtype, cached = dice.choice((torch.float16, torch.float32)), dice.choice((None, None, torch.float8_e5m2))
    spec = MLASpec(4, kv_lora_rank=48, qk_rope_head_dim=16, dtype=dtype, cache_dtype=cached)
    check("TRITON_MLA", spec, [150, 20, 97], [dice.randint(1, 3)] * 3, dice)


def check(name: str, spec: AttentionSpec, seq_lens: list[int], query_lens: list[int], dice: Random) -> None:
    page_size, seed = dice.choice((16, 48, 128)), dice.randrange(1000)
    batch = random_batch(get_backend(name), spec, seq_lens, query_lens, page_size=page_size, seed=seed)
    large, kv_cache = in_large_cache(batch)
    assert_matches(run_backend(get_backend(name), large, kv_cache=kv_cache, want_lse=True), large, str(spec))


@only_interpreted
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_tokens_beyond_31_bits(dtype: torch.dtype, rows: str) -> None:
    """Queries and outputs of a long step, as parts of wide rows."""
    batch = random_batch(get_backend("TRITON"), AttentionSpec(4, 2, 32, dtype=dtype), *ROWS[rows])
    layer = make_layer(get_backend("TRITON"), batch)
    query, output = far_apart(batch.query), far_apart(torch.zeros_like(batch.query))
    pool = batch.fresh_pool()
    layer.impl.forward(query, batch.key, batch.value, pool, layer.begin(batch), output=output)
    assert_matches(Result(output.contiguous(), None, pool), batch)


@only_interpreted
@pytest.mark.parametrize("seed", range(8))
def test_keys_made_16_bits(seed: int) -> None:
    """Those of some rows and heads, one row behind the other, in room for more."""
    dice = Random(f"upcast {seed}")
    dims = dice.choice((32, 48)), dice.choice((32, 48))
    spec = AttentionSpec(3, 3, *dims, dtype=torch.float16, cache_dtype=torch.float8_e5m2)
    seq_lens = [dice.choice((1, 63, 64, 65, dice.randint(1, 200))) for _ in range(dice.randint(1, 5))]
    more = {"page_size": dice.choice((5, 16, 64)), "layout": dice.choice(("NHD", "HND"))}
    batch, cache = in_large_cache(random_batch(get_backend("TRITON"), spec, seq_lens, [1] * len(seq_lens), **more))
    first_row, first_head = dice.randrange(len(seq_lens)), dice.randrange(3)
    heads, num_keys = dice.randint(1, 3 - first_head), sum(seq_lens[first_row:]) + dice.choice((0, 100))
    keys, values = (torch.full((num_keys, heads, dim), torch.nan, dtype=spec.dtype) for dim in dims)
    common, start = batch.common(), 0
    starts = torch.full_like(common.seq_lens, -1)
    begin, sizes = launch.UpcastFrom(first_row, first_head), (*dims, *block_dims(spec))
    launch._upcast(*cache, keys, values, starts, common.page_table, common.seq_lens, begin, sizes)
    for row, seq_len in enumerate(seq_lens[first_row:], first_row):
        positions = torch.arange(seq_len)
        pages = common.page_table[row][positions // batch.cache.page_size].long()
        slots = pages * batch.cache.page_size + positions % batch.cache.page_size
        for made, stored in zip((keys, values), cache, strict=True):
            expected = gather_slots(stored, slots)[:, first_head : first_head + heads].to(spec.dtype)
            assert made[start : start + seq_len].equal(expected)
        assert int(starts[row]) == start
        start += seq_len
    assert keys[start:].isnan().all()
    assert (starts[:first_row] == -1).all()
