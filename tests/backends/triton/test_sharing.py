"""What part of the GPU prefills have while decodes run beside them: one with which both are fast on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec
from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.kernels.prefill.tiles import PrefillTile
from attn_backends.spec import KVCacheSpec, Limits, plan_groups

sharing = pytest.importorskip("attn_backends.backends.triton.rules", reason="needs triton")
metadata = pytest.importorskip("attn_backends.backends.triton.metadata")
plans = pytest.importorskip("attn_backends.backends.triton.plans")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")
launching = pytest.importorskip("attn_backends.kernels.launch")
listing = pytest.importorskip("attn_backends.kernels.variants").listing
faster_hopper_tile = pytest.importorskip("attn_backends.kernels.prefill.faster_tile").faster_hopper_tile

# By benchmarks/rules/sharing.py.
MEASURED = json.loads(Path(__file__).parents[3].joinpath("benchmarks/results/sharing.json").read_text())["rows"]
SIZES = ("heads", "dim", "decodes", "keys of each", "prompts", "tokens of each")


def share(spec: AttentionSpec, decodes: int, keys: int, prompts: int, tokens: int) -> float:
    lens = np.array([1] * decodes + [tokens] * prompts), np.array([keys] * decodes + [tokens] * prompts)
    return float(sharing.prefill_share(spec, *lens, decodes))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(str(row[name]) for name in SIZES))
def test_as_measured(row: dict[str, Any]) -> None:
    """Never slower than in turn, nor much slower than with the best share."""
    heads, dim, *sizes = (row[name] for name in SIZES)
    query_heads, kv_heads = map(int, heads.split("/"))
    assert share(AttentionSpec(query_heads, kv_heads, dim, dtype=torch.bfloat16), *sizes) == row["share"]
    assert row["us"] < 1.01 * row["in turn us"]
    assert row["us"] < 1.06 * row["best us"]


def test_the_share_of_prefills() -> None:
    """Grows with their tokens and shrinks with the keys that decodes read: of a window those in it, of 8 bits half."""

    def of(prefill: int, decodes: int, **changes: Any) -> float:
        spec = AttentionSpec(32, 8, 128, **{"dtype": torch.bfloat16, **changes})
        return share(spec, decodes, 4096, 1, prefill)

    assert of(2048, 64) == 0.5 < of(3072, 64) < of(4096, 64) < 1.0 == of(4096, 16)
    assert of(3072, 64) < of(3072, 64, cache_dtype=torch.float8_e4m3fn)
    assert of(3072, 64) < of(3072, 64, window_left=511)
    assert of(3072, 64) == of(3072, 64, window_left=8000)


def test_decodes_that_split_prefills_take_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few, and of few keys: many keys are sooner read by the decode kernel, in shorter parts."""
    for module in (sharing, plans):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    spec, device = AttentionSpec(16, 2, 128, dtype=torch.bfloat16), torch.device("cpu")
    tile = sharing.hopper_tile(spec)

    def together(decodes: int, keys: int) -> bool:
        lens = np.array([1] * decodes + [64], np.int32), np.array([keys] * decodes + [8192], np.int32)
        alone, of_all = (
            plans.prefill_plan(spec, tile, None, *lens, decodes, device),
            plans.split_plan(spec, *lens, device),
        )
        assert alone.splits is not None
        return bool(plans.are_faster_together(spec, alone, of_all, *lens, decodes, device))

    assert together(1, 100)
    assert together(8, 1000)
    assert not together(64, 6000)


H200 = launching.Machine(132, 227 << 10, True, True, True)


def built_of(spec: AttentionSpec, rows: list[SequenceData], options: Any = None, for_graph: bool = False) -> Any:
    """A step's metadata on an H200."""
    groups, device = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)], torch.device("cpu")
    common = CommonAttentionMetadata.from_sequence_groups(groups, 16, device)
    given = plan_groups({0: spec})[0], KVCacheSpec(9000, 16), Limits(100, 1 << 16, 1 << 17), device
    with listing(H200):
        builder = metadata.TritonMetadataBuilder(*given, options=options)
        return builder.build(0, replace(common, is_mixed=for_graph, for_graph=for_graph))


def mixed(decodes: list[int], prompts: list[int]) -> list[SequenceData]:
    """Rows: decodes behind so many keys, and prompts of so many tokens."""
    sizes = [(n, 1) for n in decodes] + [(0, n) for n in prompts]
    return [SequenceData(old, new, range(-(-(old + new) // 16))) for old, new in sizes]


def test_multiprocessors_that_decodes_are_cut_for() -> None:
    """Those that a few tiles leave; all, where they leave few or are done long before the decodes, which would lose
    more by these, where nothing is beside the decodes, and in graphs."""
    spec, decodes = AttentionSpec(16, 2, 128, dtype=torch.bfloat16), [794] * 43
    assert built_of(spec, mixed(decodes, [45])).decode_sms == 120  # of twelve tiles of half the size
    assert built_of(spec, mixed([30_000] * 43, [45])).decode_sms is None
    assert built_of(spec, mixed(decodes, [900])).decode_sms is None
    assert built_of(spec, mixed(decodes, [])).decode_sms is None
    assert built_of(spec, mixed(decodes, [45]), for_graph=True).decode_sms is None
    assert built_of(replace(spec, logits_soft_cap=30.0), mixed(decodes, [45])).decode_sms is None


@pytest.mark.parametrize("seed", range(40))
def test_no_fewer_than_tiles_leave(seed: int) -> None:
    dice = Random(f"decode sms {seed}")
    heads = dice.choice(((8, 8), (16, 2), (32, 8), (12, 1)))
    spec = AttentionSpec(*heads, dice.choice((64, 128, 256)), dtype=torch.bfloat16)
    decodes = [int(2 ** dice.uniform(3, 14)) for _ in range(dice.randint(1, 60))]
    prompts = [int(2 ** dice.uniform(5, 11)) for _ in range(dice.randint(1, 4))]
    built = built_of(spec, mixed(decodes, prompts))
    if built.decode_sms is not None:
        tile = sharing.hopper_tile(spec, built.hopper_tile)
        tiles = sum(-(-tokens // tile.tokens) for tokens in prompts) * spec.num_kv_heads
        assert built.prefill_share is not None
        assert 88 <= built.decode_sms <= 132 - tiles


@pytest.mark.parametrize("kind", ["prefill_tile", "prompt_tile", None])
def test_no_decodes_go_along_where_a_given_tile_reads_pages(kind: str | None) -> None:
    """Prompts that the kernel for Hopper splits as they came: what is read from pages then takes another kernel."""
    tile = PrefillTile(64, 32, 4, 2)
    options = tuning.TritonOptions(**{kind: tile} if kind else {})
    built = built_of(AttentionSpec(2, 1, 128, dtype=torch.bfloat16), mixed([300, 300], [4000]), options)
    assert built.prefill_splits is not None
    assert built.num_decode_rows == (2 if kind else 0)
    assert (built.prefill_splits.tile.beside > 0) == (kind != "prompt_tile")  # of the kernel for Hopper


@pytest.mark.parametrize("seed", range(60))
def test_whole_prefills_alone_have_another_tile(seed: int) -> None:
    """Of random batches: where no keys are split or made 16 bits, and the portable kernel serves none, the kernel for
    Hopper takes the tile that is the faster one for the rows behind the decodes."""
    numbers, device = Random(seed), torch.device("cpu")
    heads = numbers.choice([(8, 8), (16, 2), (32, 8)])
    cached = numbers.choice([torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn])
    spec = AttentionSpec(*heads, numbers.choice([64, 128]), dtype=torch.bfloat16, cache_dtype=cached)
    decodes = [SequenceData(n, 1, range(-(-(n + 1) // 16))) for n in numbers.choices(range(1, 4000), k=seed % 7)]
    new = [int(2 ** numbers.uniform(5, 11)) for _ in range(numbers.choice([1, 4, 60]))]
    rows = decodes + [SequenceData(old, n, range(-(-(old + n) // 16)))
                      for n in new for old in [numbers.choice([0, int(2 ** numbers.uniform(0, 11))])]]  # fmt: skip
    built = built_of(spec, rows)
    behind = rows[built.num_decode_rows :]
    query_lens, seq_lens = (np.array([getattr(row, name) for row in behind], np.int32)
                            for name in ("query_len", "seq_len"))  # fmt: skip
    with listing(H200):
        faster = faster_hopper_tile(spec, query_lens, seq_lens, device)
    splits = built.prefill_splits
    assert built.hopper_tile is None or (built.hopper_tile.raw_stages > 0) == (cached.itemsize == 1)
    if built.short_tile or built.num_upcast_keys:
        assert built.hopper_tile is None
    elif built.hopper_tile is not None and built.hopper_tile.groups == 1:
        assert splits is None or splits.tile == sharing.hopper_tile(spec, built.hopper_tile)
    else:
        assert built.hopper_tile == (faster if splits is None else None)
