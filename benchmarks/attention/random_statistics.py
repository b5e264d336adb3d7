"""What a distribution of ratios is summed up by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
ENOUGH_OTHERS = 2  # that serve a shape, for the headline to count it
LIMIT = 1.05  # a shape above it is named


class Summary(NamedTuple):
    """How many ratios there are, and what they come to."""

    shapes: int
    geometric_mean: float
    median: float
    quantile_99: float
    worst: float
    won: float  # share of ratios up to 1


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed.

    >>> quantile(range(1, 101), 0.99), quantile([1, 2, 3], 0.5), quantile([1, 2, 3], 0.99)
    (99, 2, 3)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def summary(ratios: Sequence[float]) -> Summary:
    """
    >>> summary([0.5, 1.0, 2.0])
    Summary(shapes=3, geometric_mean=1.0, median=1.0, quantile_99=2.0, worst=2.0, won=0.6666666666666666)
    """
    return Summary(
        len(ratios),
        statistics.geometric_mean(ratios),
        statistics.median(ratios),
        quantile(ratios, 0.99),
        max(ratios),
        sum(ratio <= 1 for ratio in ratios) / len(ratios),
    )


def paired(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios of the same rounds. Where one had few rounds of its own, as the slow have, its median stands for all."""
    if len(times) == len(others):
        return [time / other for time, other in zip(times, others, strict=True)]
    return [statistics.median(times) / statistics.median(others)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values that hold their distribution's median between them with 95 percent or more; all of them where
    they are too few for that.

    The number of values below the median is binomial, whatever the distribution.

    >>> interval(range(1, 31))
    (10, 21)
    >>> interval([3, 1, 2])
    (1, 3)
    """
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < (count - 1) // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 0.05:
            break
        rank += 1
    low = max(0, rank - 1)
    return ordered[low], ordered[count - 1 - low]


# By library: contenders that run its kernels.
LIBRARIES = {
    "FlashInfer": ("FLASHINFER", "FlashInfer"),
    "FA3": ("FLASH_ATTN:vllm_fa3", "FLASH_ATTN:flash_attn_interface", "FA3"),
    "FA2": ("FLASH_ATTN:flash_attn", "FLASH_ATTN:vllm_fa2", "FA2"),
    "FA4": ("FLASH_ATTN:flash_attn_4", "FA4"),
}


def library(contender: str) -> str:
    """Whose kernels a contender runs: a library's backend and its bare kernels are one other, not two.

    >>> [library(name) for name in ("FLASH_ATTN:vllm_fa3, page 32", "FA3, scheduled once", "TRITON", "FA2, page 256")]
    ['FA3', 'FA3', 'TRITON', 'FA2']
    """
    name = contender.partition(",")[0]
    return next((of for of, names in LIBRARIES.items() if name in names or name.partition(" ")[0] in names), name)


def counts(row: Row) -> bool:
    """Whether the headline counts a shape: our backend serves it, and enough others do."""
    return row.get("ratio") is not None and row["others"] >= ENOUGH_OTHERS


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """By key, in the keys' order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return dict(sorted(found.items(), key=lambda pair: pair[0]))


def bucket(value: int) -> str:
    """Numbers between two powers of 4 share a line.

    >>> [bucket(value) for value in (1, 3, 4, 15, 16, 512)]
    ['1 to 3', '1 to 3', '4 to 15', '4 to 15', '16 to 63', '256 to 1023']
    """
    low = 4 ** int(math.log(value + 0.5, 4))
    return f"{low} to {4 * low - 1}"
