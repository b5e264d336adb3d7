"""Which pairs of values have run: one bit for each pair, and how that is written in a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import combinations
from typing import Any

Row = Mapping[str, Any]  # a value of each factor; None, or no entry: none declared, or none that fits the others


class Pairs:
    """Pairs of values of different factors, and each value with itself: has it run?

    Values are numbered through all factors; `masks[i]` has a bit for each value that value `i` was seen with.
    """

    def __init__(self, factors: Mapping[str, Iterable[Any]]) -> None:
        self.values = values_in(factors)
        self.number = {value: i for i, value in enumerate(self.values)}
        self.masks = [0] * len(self.values)
        of_factor: dict[str, int] = {}
        for i, (name, _) in enumerate(self.values):
            of_factor[name] = of_factor.get(name, 0) | 1 << i
        everything = (1 << len(self.values)) - 1
        self.others = [everything & ~of_factor[name] for name, _ in self.values]  # values of other factors

    def numbers(self, row: Row) -> list[int]:
        """The declared values that a row has."""
        found = (self.number.get((name, str(value))) for name, value in row.items() if value is not None)
        return [number for number in found if number is not None]

    def add(self, row: Row) -> None:
        self.add_numbers(self.numbers(row))

    def add_numbers(self, numbers: Sequence[int]) -> None:
        mask = sum(1 << number for number in numbers)
        for number in numbers:
            self.masks[number] |= mask

    def with_rows(self, rows: Iterable[Row]) -> Pairs:
        """A copy that has the pairs of these rows too."""
        found = copy(self)
        found.masks = list(self.masks)
        for row in rows:
            found.add(row)
        return found

    def add_pair(self, one: int, other: int) -> None:
        self.masks[one] |= 1 << other
        self.masks[other] |= 1 << one

    def has(self, one: int, other: int) -> bool:
        return bool(self.masks[one] >> other & 1)

    def all(self) -> Iterator[tuple[int, int]]:
        """Every pair of values of different factors, the lower number first."""
        return ((i, j) for i, j in combinations(range(len(self.values)), 2) if self.others[i] >> j & 1)

    @property
    def num_declared(self) -> int:
        return sum(mask.bit_count() for mask in self.others) // 2

    @property
    def num_seen(self) -> int:
        """Pairs of different factors that were seen."""
        return sum((mask & others).bit_count() for mask, others in zip(self.masks, self.others, strict=True)) // 2

    def num_seen_outside(self, other: Pairs) -> int:
        """Pairs of different factors that were seen here and not there, of the same values."""
        parts = zip(self.masks, other.masks, self.others, strict=True)
        return sum((mine & ~theirs & others).bit_count() for mine, theirs, others in parts) // 2

    def unseen(self, excused: Iterable[Pairs] = ()) -> dict[str, list[str]]:
        """Pairs that were seen neither here nor in `excused`, each once: by its one value, the other ones."""
        known, found = [self, *excused], dict[str, list[str]]()
        for one, other in self.all():
            if not any(pairs.has(one, other) for pairs in known):
                found.setdefault(self._word(one), []).append(self._word(other))
        return found

    def _word(self, number: int) -> str:
        return "=".join(self.values[number])

    def as_json(self) -> list[str]:
        """The masks in hexadecimal, in the order of the values."""
        return [f"{mask:x}" for mask in self.masks]

    def merge(self, values: Sequence[tuple[str, str]], masks: Sequence[str]) -> None:
        """Add the pairs of a report, whose values may be numbered otherwise."""
        numbers = [self.number.get(value) for value in values]
        for one, mask in zip(numbers, masks, strict=True):
            bits = int(mask, 16)
            for place, other in enumerate(numbers):
                if one is not None and other is not None and bits >> place & 1:
                    self.add_pair(one, other)


def counted(run: Pairs, refused: Mapping[str, Pairs]) -> dict[str, Any]:
    """How many pairs are declared, have run, are refused by what, and did neither; those by name.

    What one run refuses and another has run counts as run: they were on machines or with versions that differ.
    """
    not_run = run.unseen(refused.values())
    numbers = {
        "declared": run.num_declared,
        "run": run.num_seen,
        "refused": {why: pairs.num_seen_outside(run) for why, pairs in sorted(refused.items())},
        "not_run": sum(map(len, not_run.values())),
    }
    masks = {"run": run.as_json(), "refused": {why: pairs.as_json() for why, pairs in sorted(refused.items())}}
    return {"num_pairs": numbers, "pairs_not_run": not_run, "pairs": masks}


def values_in(report: Mapping[str, Iterable[Any]]) -> list[tuple[str, str]]:
    """The values of a report in the order in which its masks number them."""
    return [(name, str(value)) for name, values in report.items() for value in values]
