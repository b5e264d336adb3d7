"""Placeholders of a batch: joined from its rows', cut for its parts, and refused where they name nothing."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from attn_backends import CommonAttentionMetadata, SequenceData, SequenceGroup, pad_rows, slice_rows
from attn_backends.batch.placeholders import IndexMap


def row(numbers: Random) -> SequenceData:
    length, num_embeddings = numbers.randint(1, 30), numbers.randint(0, 12)
    count = numbers.randint(0, min(length, num_embeddings))
    maps = {}
    for modality in numbers.sample(("image", "audio"), numbers.randint(0, 2)):
        src, dest = (np.array(sorted(numbers.sample(range(n), count)), np.int32) for n in (num_embeddings, length))
        maps[modality] = IndexMap(src, dest, num_embeddings)
    return SequenceData(0, length, range(2), placeholders=maps)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_gets_its_own_rows_embedding(seed: int) -> None:
    """Embeddings are numbers that say row and place; a batch's map has to find them, whole, padded or in parts."""
    numbers = Random(seed)
    rows = [row(numbers) for _ in range(numbers.randint(1, 6))]
    common = CommonAttentionMetadata.from_sequence_groups([SequenceGroup("all", tuple(rows))], 16)
    common = pad_rows(common, len(rows) + numbers.randint(0, 2))
    for modality in ("image", "audio"):
        brought = [(i, n) for i, r in enumerate(rows) if modality in r.placeholders
                   for n in range(r.placeholders[modality].num_embeddings)]  # fmt: skip
        starts = common.query_start_loc_cpu.tolist()
        expected = [(starts[i] + int(to), (i, int(of))) for i, r in enumerate(rows) if modality in r.placeholders
                    for of, to in zip(*r.placeholders[modality][:2], strict=True)]  # fmt: skip
        found = common.multi_modal_placeholder_index_maps.get(modality)
        assert ([] if found is None else [(to, brought[of]) for of, to in zip(*found[:2], strict=True)]) == expected
        start = numbers.randrange(len(rows))
        stop = numbers.randint(start + 1, len(rows))
        first, end = (int(common.query_start_loc_cpu[i]) for i in (start, stop))
        part = slice_rows(common, start, stop).multi_modal_placeholder_index_maps.get(modality)
        inside = [(to - first, of) for to, of in expected if first <= to < end]
        assert ([] if part is None else [(to, brought[of]) for of, to in zip(*part[:2], strict=True)]) == inside


@pytest.mark.parametrize("wrong", [([0], [5], 1), ([1], [0], 1), ([0, 1], [0], 2), ([-1], [0], 1)])
def test_maps_that_name_nothing(wrong: tuple[list[int], list[int], int]) -> None:
    with pytest.raises(ValueError, match="placeholders of 'image' map embeddings"):
        SequenceData(0, 5, [1], placeholders={"image": IndexMap(np.array(wrong[0]), np.array(wrong[1]), wrong[2])})
