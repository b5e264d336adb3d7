"""MLA decodes that nobody chose, of published models' heads; as `shape_draws` draws those of plain attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from attn_backends.testing.cases.models import published_models
from benchmarks.attention.mla_problem import MLAShape
from benchmarks.attention.shape_draws import LENGTHS, ON_CPU, ON_GPU, SLICES, Bounds, Dice, lengths_of, purpose

ONE_TOKEN, MOST_TOKENS = 0.65, 8  # share of decodes with one; tokens to verify at most
WIDTH = 576  # columns of a latent row, 512 of them values
BOUNDS = {"cuda": ON_GPU._replace(num_bytes=1 << 30, flops=6e11), "cpu": ON_CPU}


@dataclass(frozen=True)
class MLADrawn:
    """A shape with what it was drawn as."""

    seed: int
    index: int
    source: str  # the model whose heads it has
    lengths: str
    shape: MLAShape

    @property
    def id(self) -> str:
        return f"{self.seed}/{self.index}"


@cache
def published_heads() -> tuple[tuple[str, int], ...]:
    """The different numbers of query heads of models with latent rows of 512 + 64 columns, and of their slices, each
    with the model that has it first."""
    found: dict[int, str] = {}
    for model in published_models():
        if (model.kv_lora_rank, model.qk_rope_head_dim) == (512, 64):
            for num_slices in SLICES:
                if model.num_qo_heads % num_slices == 0:
                    name = model.name if num_slices == 1 else f"{model.name}, 1/{num_slices}"
                    found.setdefault(model.num_qo_heads // num_slices, name)
    return tuple((name, heads) for heads, name in sorted(found.items()))


def draw(seed: int, index: int, bounds: Bounds) -> MLADrawn:
    """The shape of this number. Sizes are drawn again until they are in bounds.

    Raises:
        ValueError: the seed is for nothing.
    """
    purpose(seed)
    dice = Dice(f"MLA {seed}/{index}")
    source, heads = dice.one(published_heads())
    query_len = 1 if dice.random() < ONE_TOKEN else 2 + int(dice.random() * (MOST_TOKENS - 1))
    while True:
        lengths = dice.of(LENGTHS)
        lens = lengths_of(dice, lengths, dice.between(1, bounds.requests), bounds.keys - query_len, bounds)
        shape = MLAShape(tuple(seq_len + query_len - 1 for seq_len in lens), (heads, 1, WIDTH), query_len=query_len)
        num_bytes = 2 * WIDTH * sum(math.ceil(seq_len / 64) * 64 for seq_len in shape.seq_lens)
        if num_bytes <= bounds.num_bytes and shape.flops <= bounds.flops:
            return MLADrawn(seed, index, source, lengths, shape)
