"""Shapes that nobody chose: drawn from the heads of published models, so that a seed and an index name one everywhere.

Seeds for tuning and seeds for judging are ranges of their own. Nothing that was tuned on the first may claim the
second, and no report mixes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from attn_backends.testing.cases.models import published_models
from benchmarks.attention.contest import CACHE_DTYPES
from benchmarks.attention.paged_problem import Shape

TUNING, JUDGING = range(1000), range(1000, 2000)
KINDS = {"decode": 0.5, "verify": 0.12, "chunks": 0.1, "prompts": 0.12, "mixed": 0.08, "windows": 0.08}
READS = ("decode", "verify")  # kinds that take what it takes to read their keys and values, at least
HEAD_DIMS = {64: 0.2, 80: 0.05, 96: 0.05, 112: 0.03, 128: 0.5, 192: 0.05, 256: 0.12}
DTYPES = {"bf16": 0.65, "fp16": 0.15, "fp8": 0.2}
PAGE_SIZES = {16: 0.4, 32: 0.2, 64: 0.2, 128: 0.2}
SLICES = (1, 2, 4, 8)  # GPUs that share a model's heads
MOST_GROUP, MOST_KV_HEADS = 16, 64
FREE_HEADS = 0.15  # share of shapes whose heads are no model's
LARGEST_PAGE = 256  # in slots: kernels that know no smaller page get the same memory in such
LENGTHS = {"equal": 0.25, "near": 0.35, "skewed": 0.25, "few long": 0.15}


class Bounds(NamedTuple):
    """What a shape may ask for at most."""

    requests: int
    keys: int  # of a request
    num_bytes: int  # keys and values of one copy, in pages of LARGEST_PAGE
    flops: float
    shortest: int = 16


ON_GPU = Bounds(512, 131_072, 4 << 30, 5e12)
ON_CPU = Bounds(6, 150, 24 << 20, 2e8, shortest=4)
BOUNDS = {"cpu": ON_CPU, "cuda": ON_GPU}  # by the kind of device


@dataclass(frozen=True)
class Drawn:
    """A shape with what it was drawn as."""

    seed: int
    index: int
    kind: str
    source: str  # the model whose heads it has
    lengths: str
    shape: Shape
    dtype: str
    page_size: int

    @property
    def id(self) -> str:
        return f"{self.seed}/{self.index}"


def purpose(seed: int) -> str:
    """What a seed is for.

    Raises:
        ValueError: for nothing.

    >>> purpose(7), purpose(1007)
    ('tuning', 'judging')
    """
    for name, seeds in (("tuning", TUNING), ("judging", JUDGING)):
        if seed in seeds:
            return name
    raise ValueError(
        f"seed {seed} is for nothing: give one of {TUNING[0]} to {TUNING[-1]} to tune by, "
        f"or of {JUDGING[0]} to {JUDGING[-1]} to judge by"
    )


@cache
def published_heads() -> dict[int, tuple[tuple[str, tuple[int, int, int]], ...]]:
    """By head dim: the different heads of models and of their slices, each with the model that has them first."""
    found: dict[int, dict[tuple[int, int, int], str]] = {head_dim: {} for head_dim in HEAD_DIMS}
    for model in published_models():
        for num_slices in SLICES if not model.is_mla and model.head_dim in HEAD_DIMS else ():
            heads = _sliced(model.num_qo_heads, model.num_kv_heads, num_slices)
            if heads and heads[0] <= MOST_GROUP * heads[1] and heads[1] <= MOST_KV_HEADS:
                name = model.name if num_slices == 1 else f"{model.name}, 1/{num_slices}"
                found[model.head_dim].setdefault((*heads, model.head_dim), name)
    return {head_dim: tuple((name, heads) for heads, name in each.items()) for head_dim, each in found.items()}


def _sliced(num_qo_heads: int, num_kv_heads: int, num_slices: int) -> tuple[int, int] | None:
    """A GPU's heads: KV heads are shared out, or stand on several GPUs where there are fewer. None: not evenly.

    >>> _sliced(32, 8, 4), _sliced(32, 8, 3), _sliced(16, 2, 8)
    ((8, 2), None, (2, 1))
    """
    if num_qo_heads % num_slices or (num_kv_heads % num_slices and num_slices % num_kv_heads):
        return None
    return num_qo_heads // num_slices, max(1, num_kv_heads // num_slices)


class Dice(random.Random):
    """Draws that are the same everywhere: all come from `random()`, seeded by a text."""

    def of(self, weights: dict[Any, float]) -> Any:
        at = self.random() * sum(weights.values())
        for name, weight in weights.items():
            at -= weight
            if at < 0:
                return name
        return name

    def one(self, names: Sequence[Any]) -> Any:
        return names[int(self.random() * len(names))]

    def between(self, low: int, high: int) -> int:
        """Uniform in the logarithm, both ends included."""
        drawn = math.exp(math.log(low) + self.random() * (math.log(high + 1) - math.log(low)))
        return max(low, min(high, int(drawn)))


def draw(seed: int, index: int, bounds: Bounds = ON_GPU) -> Drawn:
    """The shape of this number. Sizes are drawn again until they are in bounds.

    Raises:
        ValueError: the seed is for nothing.
    """
    purpose(seed)
    dice = Dice(f"{seed}/{index}")
    kind, dtype, page_size = dice.of(KINDS), dice.of(DTYPES), dice.of(PAGE_SIZES)
    source, heads = _heads(dice)
    while True:
        lengths = dice.of(LENGTHS)
        shape = MAKERS[kind](dice, heads, lengths, bounds)
        if _fits(shape, dtype, bounds):
            return Drawn(seed, index, kind, source, lengths, shape, dtype, page_size)


def drawn(seed: int, count: int, kinds: Sequence[str], bounds: Bounds = ON_GPU) -> Iterator[Drawn]:
    """The first so many shapes of these kinds. A shape has the same number whatever kinds are asked for."""
    index = 0
    while count:
        each = draw(seed, index, bounds)
        index += 1
        if each.kind in kinds:
            count -= 1
            yield each


def _heads(dice: Dice) -> tuple[str, tuple[int, int, int]]:
    head_dim = dice.of(HEAD_DIMS)
    if dice.random() < FREE_HEADS:
        group, num_kv_heads = 1 + int(dice.random() * MOST_GROUP), dice.between(1, MOST_KV_HEADS)
        return "no model", (group * num_kv_heads, num_kv_heads, head_dim)
    return dice.one(published_heads()[head_dim])  # type: ignore[no-any-return]


def _fits(shape: Shape, dtype: str, bounds: Bounds) -> bool:
    slots = sum(-(-seq_len // LARGEST_PAGE) * LARGEST_PAGE for seq_len in shape.seq_lens)
    num_bytes = 2 * slots * shape.heads[1] * shape.heads[2] * CACHE_DTYPES[dtype].itemsize
    return max(shape.seq_lens) <= bounds.keys and num_bytes <= bounds.num_bytes and shape.flops <= bounds.flops


def lengths_of(dice: Dice, lengths: str, count: int, longest: int, bounds: Bounds) -> tuple[int, ...]:
    """How many keys each request has."""
    mean = dice.between(bounds.shortest, longest)
    if lengths == "equal":
        return (mean,) * count
    if lengths == "near":
        near = (int(mean * (0.5 + dice.random())) for _ in range(count))
        return tuple(max(bounds.shortest, min(longest, seq_len)) for seq_len in near)
    if lengths == "skewed":
        return tuple(dice.between(bounds.shortest, mean) for _ in range(count))
    num_long = dice.between(1, max(1, count // 8))
    short = dice.between(bounds.shortest, max(bounds.shortest, mean // 8))
    lens = [mean] * num_long + [short] * (count - num_long)
    for i in range(count - 1, 0, -1):  # in any order
        j = int(dice.random() * (i + 1))
        lens[i], lens[j] = lens[j], lens[i]
    return tuple(lens)


def _decode(dice: Dice, heads: tuple[int, int, int], lengths: str, bounds: Bounds) -> Shape:
    return Shape(lengths_of(dice, lengths, dice.between(1, bounds.requests), bounds.keys, bounds), heads)


def _verify(dice: Dice, heads: tuple[int, int, int], lengths: str, bounds: Bounds) -> Shape:
    query_len = 2 + int(dice.random() * 15)
    lens = lengths_of(dice, lengths, dice.between(1, bounds.requests), bounds.keys - query_len, bounds)
    return Shape(tuple(seq_len + query_len for seq_len in lens), heads, query_len=query_len)


def _prompts(dice: Dice, heads: tuple[int, int, int], lengths: str, bounds: Bounds) -> Shape:
    count = dice.between(1, min(256, bounds.requests))
    return Shape(lengths_of(dice, lengths, count, min(65536, bounds.keys), bounds), heads, is_prefill=True)


def _chunks(dice: Dice, heads: tuple[int, int, int], lengths: str, bounds: Bounds) -> Shape:
    """The next tokens of prompts whose beginning is cached."""
    count, most = dice.between(1, min(64, bounds.requests)), max(bounds.shortest, min(8192, bounds.keys // 2))
    prefixes = lengths_of(dice, lengths, count, bounds.keys - most, bounds)
    chunks = lengths_of(dice, dice.of(LENGTHS), count, most, bounds)
    seq_lens = tuple(prefix + new for prefix, new in zip(prefixes, chunks, strict=True))
    return Shape(seq_lens, heads, is_prefill=True, chunk_lens=chunks)


def _mixed(dice: Dice, heads: tuple[int, int, int], lengths: str, bounds: Bounds) -> Shape:
    """Decodes, and behind them prompts or chunks."""
    few = bounds._replace(requests=max(1, min(8, bounds.requests // 2)))
    prefill = dice.one((_prompts, _chunks))(dice, heads, dice.of(LENGTHS), few)
    decodes = _decode(dice, heads, lengths, bounds._replace(requests=max(1, bounds.requests // 2))).seq_lens
    return Shape(
        decodes + prefill.seq_lens, heads, is_prefill=True, decodes=len(decodes), chunk_lens=prefill.chunk_lens
    )


def _windows(dice: Dice, heads: tuple[int, int, int], lengths: str, bounds: Bounds) -> Shape:
    """Decodes, or prompts, of layers that see a published model's window."""
    window_left = dice.one(sorted({model.window_left for model in published_models() if model.window_left is not None}))
    shape: Shape = dice.one((_decode, _prompts))(dice, heads, lengths, bounds)
    return Shape(shape.seq_lens, heads, is_prefill=shape.is_prefill, window_left=window_left)


Maker = Callable[[Dice, tuple[int, int, int], str, Bounds], Shape]
MAKERS: dict[str, Maker] = {
    "decode": _decode, "verify": _verify, "chunks": _chunks, "prompts": _prompts, "mixed": _mixed, "windows": _windows,
}  # fmt: skip
