"""The cases of a run: random ones, or rows of values in which every pair that a backend serves is found, a covering
array, one row at a time.

Each row is the best of several: it starts from a pair that is missing, and takes factor after factor, in any order,
the value that adds most missing pairs (Cohen, Dalal, Fredman and Patton, "The AETG system", 1997). Everything follows
from the backend, the device and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations_with_replacement, count
from random import Random
from typing import Any

from attn_backends.interface import AttentionBackend
from attn_backends.testing.verify.campaign import SEEDS_OF_A_RUN, Job, random_blocks
from attn_backends.testing.verify.declared import OF_DECODERS, refusal
from attn_backends.testing.verify.factors import EAGER, WIDE_GRAPH, Factors, factors, restricted
from attn_backends.testing.verify.pairs import Pairs, values_in
from attn_backends.testing.verify.sizes import SIZES
from attn_backends.testing.verify.worker import Asked, prepare

Row = dict[str, Any]
Refuses = Callable[[Row], str | None]

_RANDOM_ROWS = 600  # each that is served shows at once that all of its pairs are
_TRIES = 40  # rows that are tried for one pair before it is refused
_CANDIDATES = 24  # rows of which the best is taken
_MOST_ALIKE = 8  # rows of one form that one worker takes
_FEATURES = ("soft_cap", "window", "sinks", "alibi", "rope", "chunks", "non_causal", "attention_type")
_FORM = ("dtype", "cache_dtype", "head_dim", "head_dim_vo", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim")


class Served:
    """Which pairs of values a backend serves, and why it refuses the others."""

    def __init__(self, given: Factors, refuses: Refuses) -> None:
        self.factors, self.refuses = given, refuses
        self.pairs = Pairs(given)
        self.refused: dict[str, Pairs] = {}  # by the codes that refuse them
        self.rows: dict[tuple[int, int], Row] = {}  # one that has a pair, for each that is served
        self._values = [(name, value) for name, values in given.items() for value in values]
        numbers = Random(f"served {list(given)}")
        for _ in range(_RANDOM_ROWS):
            self._try(self._tidy({name: numbers.choice(values) for name, values in given.items()}, {}))
        for pair in [*((i, i) for i in range(len(self._values))), *self.pairs.all()]:
            if not self.pairs.has(*pair):
                self._look_for(pair, numbers)

    def _look_for(self, pair: tuple[int, int], numbers: Random) -> None:
        """A row with both values, the others plain or nearly; if there is none, the fewest codes that refuse one."""
        fixed, why = dict(self._values[number] for number in pair), ""
        hopeless = not all(self.pairs.has(number, number) for number in pair) and pair[0] != pair[1]
        for attempt in range(1 if hopeless else _TRIES):  # a value that no layer has alone
            row = {name: values[0] for name, values in self.factors.items()}
            if attempt:
                row |= {name: numbers.choice(values) for name, values in self.factors.items() if numbers.random() < 0.3}
            found = self._try(self._tidy(row | fixed, fixed))
            if found is None:
                return
            why = min(why or found, found, key=lambda codes: codes.count("+"))
        self.refused.setdefault(why, Pairs(self.factors)).add_pair(*pair)

    def _try(self, row: Row) -> str | None:
        why = self.refuses(row)
        if why is None:
            numbers = sorted(self.pairs.numbers(row))
            for i, j in combinations_with_replacement(numbers, 2):
                self.rows.setdefault((i, j), row)
            self.pairs.add_numbers(numbers)
        return why

    def _tidy(self, row: Row, fixed: Row) -> Row:
        """Values that are not fixed, changed to what fits the fixed ones."""
        if row["attention_type"] != "decoder" and not {"kind", "non_causal", "run"} & set(fixed):
            row = {name: value for name, value in row.items() if name not in OF_DECODERS} | {"run": EAGER}
        if fixed.get("run") == WIDE_GRAPH and "kind" not in fixed:
            row["kind"] = "verify"
        if "cache_dtype" not in fixed and row["dtype"] in self.factors["cache_dtype"]:
            row["cache_dtype"] = row["dtype"]
        elif "dtype" not in fixed and row["cache_dtype"] in self.factors["dtype"]:
            row["dtype"] = row["cache_dtype"]
        return row


class CoveringArray:
    """Rows that have every pair which is served, in an order in which workers take them."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served, self._numbers = served, Random(f"covering array {seed}")
        self._missing = [mask & others for mask, others in zip(served.pairs.masks, served.pairs.others, strict=True)]
        self._ids = {name: [served.pairs.number[name, str(value)] for value in values]
                     for name, values in served.factors.items()}  # fmt: skip
        rows: list[Row] = []
        while any(self._missing):
            # The candidate with most missing pairs; where all are refused, the row that a missing pair is known by.
            best, most = None, 0
            for _ in range(_CANDIDATES):
                counts = [mask.bit_count() for mask in self._missing]
                first = self._best(range(len(counts)), counts)
                partners = [j for j in range(len(counts)) if self._missing[first] >> j & 1]
                second = self._best(partners, [counts[j] for j in partners])
                row = self._candidate(first, second)
                if row is not None and (gain := self._gain(row)) > most and self._served.refuses(row) is None:
                    best, most = row, gain
            rows.append(best or self._served.rows[min(first, second), max(first, second)])
            numbers = self._served.pairs.numbers(rows[-1])
            mask = sum(1 << number for number in numbers)
            for number in numbers:
                self._missing[number] &= ~mask
        self.blocks = in_blocks(rows)

    def _candidate(self, first: int, second: int) -> Row | None:
        values, pairs = self._served.pairs.values, self._served.pairs
        chosen = {values[number][0]: number for number in (first, second)}
        mask, allowed = 1 << first | 1 << second, pairs.masks[first] & pairs.masks[second]
        names = [name for name in self._ids if name not in chosen]
        for name in self._numbers.sample(names, k=len(names)):
            fitting = [number for number in self._ids[name] if allowed >> number & 1]
            if not fitting and name not in OF_DECODERS:
                return None
            if fitting:
                number = self._best(fitting, [(self._missing[number] & mask).bit_count() for number in fitting])
                chosen[name], mask, allowed = number, mask | 1 << number, allowed & pairs.masks[number]
        place = {name: self._ids[name].index(number) for name, number in chosen.items()}
        return {name: values[place[name]] for name, values in self._served.factors.items() if name in place}

    def _best(self, numbers: Sequence[int], gains: Sequence[int]) -> int:
        """One of those with the largest gain."""
        most = max(gains)
        return self._numbers.choice([number for number, gain in zip(numbers, gains, strict=True) if gain == most])

    def _gain(self, row: Row) -> int:
        numbers = self._served.pairs.numbers(row)
        mask = sum(1 << number for number in numbers)
        return sum((self._missing[number] & mask).bit_count() for number in numbers)


def in_blocks(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one form together, those of equal features next to one another: what was compiled for one serves others.

    Blocks come in the order of their first rows, so that what a run leaves out when its time is over adds least.
    """
    forms: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(rows):
        forms.setdefault(tuple(row.get(name) for name in _FORM), []).append(number)
    blocks: list[list[int]] = []
    for numbers in forms.values():
        alike = sorted(numbers, key=lambda number: [str(rows[number].get(name)) for name in _FEATURES])
        blocks += [alike[start : start + _MOST_ALIKE] for start in range(0, len(alike), _MOST_ALIKE)]
    return [[rows[number] for number in block] for block in sorted(blocks, key=min)]


def served_by(backend: type[AttentionBackend], device: str, where: Sequence[str] = ()) -> Served:
    """What a backend serves on a device, by `backend.reject`, of the values that `where` leaves."""
    return Served(restricted(factors(backend), where), lambda row: refusal(backend, row, device))


def missing_rows(blocks: Sequence[Sequence[Row]], covered: Pairs) -> list[list[tuple[int, Row]]]:
    """Blocks of rows with their numbers, without rows whose pairs were all covered before."""
    numbered, kept = count(), []
    for block in blocks:
        rows = [(next(numbered), row) for row in block]
        kept.append([(number, row) for number, row in rows if covered.with_rows([row]).num_seen_outside(covered)])
    return [block for block in kept if block]


def most_first(blocks: Sequence[Sequence[tuple[int, Row]]], covered: Pairs) -> list[list[tuple[int, Row]]]:
    """Blocks in the order in which each adds most pairs to those covered before, a row; those that add none are left
    out. What a run has no time for is then what would have added least."""
    taken = list[list[tuple[int, Row]]]()
    queue = [(-float(covered.num_declared), place) for place in range(len(blocks))]
    heapify(queue)
    while queue:
        _, place = heappop(queue)
        after = covered.with_rows(row for _, row in blocks[place])
        gain = after.num_seen_outside(covered) / len(blocks[place])
        if queue and gain < -queue[0][0]:  # others have taken of its pairs, which only become fewer
            heappush(queue, (-gain, place))
        elif gain:
            taken.append(list(blocks[place]))
            covered = after
    return taken


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
        try:
            found = covered if covered.get("backend") == asked.name else covered["backends"][asked.name]
            pairs.merge(values_in(found["values"]), found["pairs"]["run"])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"--covered has no values of {asked.name} that ran: give a report of --json, or several merged"
            ) from error
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
