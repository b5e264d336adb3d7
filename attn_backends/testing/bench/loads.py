"""What layers are measured at: decodes of few and many requests, short and long, and prompts; within limits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, product, zip_longest
from typing import Literal, NamedTuple

from attn_backends.registry import Load
from attn_backends.spec import AttentionSpec, new_kv_shapes

Phase = Literal["prefill", "decode"]
DECODES = tuple(product((64, 8, 1, 256), (1024, 8192, 256, 32768)))  # requests and keys, those that matter most first
PROMPTS = ((1, 2048), (16, 256), (1, 8192), (4, 2048), (64, 128), (1, 512))  # prompts and tokens of each


class LoadCase(NamedTuple):
    """One load of one phase."""

    phase: Phase
    load: Load

    @property
    def query_len(self) -> int:
        return self.load.num_keys if self.phase == "prefill" else 1

    def __str__(self) -> str:
        what = "prompts of" if self.phase == "prefill" else "decodes of"
        return f"{self.load.num_requests} {what} {self.load.num_keys}"


def cases(max_model_len: int, max_num_requests: int, most_tokens: int, most_keys: int) -> list[LoadCase]:
    """Loads of both phases in turns, those that matter most first. Lengths above the model's limit are that limit.

    Args:
        most_tokens: query tokens of a step, at most.
        most_keys: keys that there is memory for.
    """
    decodes = _fitting("decode", DECODES, max_model_len, max_num_requests, most_keys)
    prompts = _fitting("prefill", PROMPTS, max_model_len, max_num_requests, min(most_tokens, most_keys))
    return [case for case in chain(*zip_longest(decodes, prompts)) if case is not None]


def _fitting(
    phase: Phase, loads: Iterable[tuple[int, int]], max_model_len: int, max_num_requests: int, most_keys: int
) -> list[LoadCase]:
    made = {LoadCase(phase, Load(min(requests, max_num_requests), min(keys, max_model_len))): None
            for requests, keys in loads}  # fmt: skip
    return [case for case in made if case.load.num_requests * case.load.num_keys <= most_keys]


def bytes_per_key(spec: AttentionSpec) -> int:
    """What one token takes in a layer's cache."""
    key, value = new_kv_shapes(spec)
    return sum(_product(shape) for shape in (key, value)) * spec.cache_dtype.itemsize


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
