"""The cases of a run: random ones, or those of a covering array of what a backend declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from attn_backends.testing.verify.campaign import SEEDS_OF_A_RUN, Job, random_blocks
from attn_backends.testing.verify.covering import CoveringArray, missing_rows, most_first, served_by
from attn_backends.testing.verify.declared import Row
from attn_backends.testing.verify.pairs import Pairs, values_in
from attn_backends.testing.verify.sizes import SIZES
from attn_backends.testing.verify.worker import Asked, prepare


@dataclass(frozen=True)
class Planned:
    """What is to run, in blocks that one worker takes whole."""

    first_seed: int
    blocks: Iterable[list[Job]]
    num_cases: int | None  # None: as many as there is time for
    refused: Mapping[str, Pairs]  # pairs of declared values that the backend refuses, by what refuses them
    continued: bool = False  # cases that an earlier run made needless are left out


def plan_random(asked: Asked, seed: int, num_cases: int | None) -> Planned:
    first = seed * SEEDS_OF_A_RUN
    return Planned(first, random_blocks(first, num_cases, SIZES[asked.size].siblings), num_cases, {})


def plan_declared(asked: Asked, seed: int, most: int | None, covered: Mapping[str, Any] | None = None) -> Planned:
    """The rows of a covering array; without those whose pairs have all run, and what adds most pairs first.

    Args:
        most: of the rows; None: all.
        covered: a report, or several merged.

    Raises:
        ValueError: `covered` says nothing of the backend's values, or `asked.where` names others.
    """
    served = served_by(prepare(asked), asked.device, asked.where)
    pairs = Pairs(served.factors)
    if covered is not None:
        _add_covered(pairs, covered, asked.name)
    first = seed * SEEDS_OF_A_RUN
    rows = missing_rows(CoveringArray(served, seed).blocks, pairs)
    if covered is not None:
        rows = most_first(rows, pairs)
    blocks: list[list[Job]] = [[(first + number, row) for number, row in block] for block in rows]
    if most is not None:
        starts = accumulate(map(len, blocks), initial=0)
        blocks = [block[: most - start] for block, start in zip(blocks, starts, strict=False) if start < most]
    refused = {} if asked.where else served.refused  # other values of those factors may be served
    return Planned(first, blocks, sum(map(len, blocks)), refused, covered is not None)


def row_of(asked: Asked, seed: int) -> Row:
    """The row of a covering array that a case has.

    Raises:
        ValueError: the array has fewer rows.
    """
    array, number = divmod(seed, SEEDS_OF_A_RUN)
    served = served_by(prepare(asked), asked.device, asked.where)
    rows = [row for block in CoveringArray(served, array).blocks for row in block]
    if number >= len(rows):
        first = array * SEEDS_OF_A_RUN
        raise ValueError(f"--case is {seed}; the array of seed {array} has cases {first} to {first + len(rows) - 1}")
    return rows[number]


def _add_covered(pairs: Pairs, covered: Mapping[str, Any], name: str) -> None:
    found = covered if covered.get("backend") == name else covered.get("backends", {}).get(name, {})
    if "pairs" not in found:
        raise ValueError(f"--covered has no values of {name} that ran: give a report of --json, or several merged")
    pairs.merge(values_in(found["values"]), found["pairs"]["run"])
