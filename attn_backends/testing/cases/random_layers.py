"""Layers and batches that nobody picked: a feature's numbers, heads, pages and rows by chance, alike in every run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from attn_backends.spec import AttentionType, Layout
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import Feature, feature
from attn_backends.testing.cases.models import published_models

# One of each kind. There are no other combinations: libraries compile kernels for each, which may take minutes.
KINDS = (
    "plain", "window_15", "soft_cap", "alibi", "sinks", "chunks", "non_causal", "non_causal_window",
    "non_causal_chunks", "gemma2", "gpt_oss", "soft_cap_and_sinks", "alibi_and_window", "alibi_and_soft_cap",
    "standard_alibi", "standard_alibi_and_window", "rope", "rope_and_window", "rope_soft_cap_and_sinks",
    "encoder", "cross",
)  # fmt: skip
_CONTEXTS = (0, 1, 15, 16, 17, 63, 64, 65, 100, 255, 300)  # keys in the cache before the step
_QUERIES = (2, 3, 7, 16, 17, 33, 64, 65, 130)


@dataclass(frozen=True)
class RandomLayer:
    """A layer, a batch for it, and how it is run."""

    feature: Feature
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    layout: Layout
    rows: BatchShape
    new_kv_lens: tuple[int, ...] | None  # for cross attention; None: those of the queries
    cached: bool  # False: a profile run
    shared_len: int  # leading keys that all rows have in common
    num_padded_reqs: int
    want_lse: bool


def random_layers(kind: str, num: int) -> list[RandomLayer]:
    """So many layers of a kind, one of KINDS. They depend on nothing else."""
    numbers = Random(kind)
    return [_layer(feature(kind), numbers) for _ in range(num)]


def _layer(plain: Feature, numbers: Random) -> RandomLayer:
    drawn = {
        "window_left": int(2 ** numbers.uniform(0, 10)) - 1,
        "chunk_size": int(2 ** numbers.uniform(0, 10)),
        "logits_soft_cap": numbers.uniform(1.0, 30.0),
        "scale": numbers.uniform(0.05, 0.5),
        "rope_scale": numbers.uniform(0.5, 8.0),
        "rope_theta": numbers.choice((1e4, 5e5, 1e6)),
    }
    changes: dict[str, Any] = {name: drawn.get(name, value) for name, value in plain.changes.items()}
    attention_type = changes.get("attention_type", AttentionType.DECODER)
    heads, page_size = numbers.choice(_heads()), numbers.choice((1, 16, 32, 64, 256))
    layout: Layout = numbers.choice(("NHD", "HND"))
    queries, contexts = _rows(numbers)
    new_kv_lens = None
    if attention_type is AttentionType.DECODER:
        seq_lens = [context + query for context, query in zip(contexts, queries, strict=True)]
    elif attention_type is AttentionType.ENCODER:
        seq_lens = queries
    else:  # of the encoder; a row may have none
        seq_lens = contexts
        new_kv_lens = tuple(numbers.choice((0, length)) for length in seq_lens)
    shared = min(contexts) // page_size if attention_type is AttentionType.DECODER else 0
    return RandomLayer(
        feature=replace(plain, changes=changes),
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size,
        layout=layout,
        rows=BatchShape(seq_lens=tuple(seq_lens), query_lens=tuple(queries)),
        new_kv_lens=new_kv_lens,
        cached=any(contexts) or attention_type is not AttentionType.DECODER or numbers.random() < 0.5,
        shared_len=numbers.randint(0, shared) * page_size,
        num_padded_reqs=numbers.choice((0, 0, 1, 3)),
        want_lse=numbers.random() < 0.5,
    )


@cache
def _heads() -> list[tuple[int, int]]:
    """Heads of queries, and of keys and values: those of published models, on one of so many GPUs that it has at most
    two of the latter."""
    found = set()
    for model in published_models():
        kv = model.num_kv_heads
        ways = next(n for n in range(1, kv + 1) if kv % n == 0 and kv // n <= 2)
        found.add((model.num_qo_heads // ways, kv // ways))
    return sorted(found)


def _rows(numbers: Random) -> tuple[list[int], list[int]]:
    """Query lengths and contexts of a step: decodes, tokens to verify, whole prompts, or any of these together."""
    num_rows, kind = numbers.choice((1, 2, 3, 5, 8)), numbers.choice(("decode", "verify", "prompts", "mixed", "mixed"))
    queries, contexts = numbers.choices(_QUERIES, k=num_rows), numbers.choices(_CONTEXTS, k=num_rows)
    if kind == "decode":
        queries = [1] * num_rows
    elif kind == "verify":
        queries = [numbers.randint(2, 16)] * num_rows
    elif kind == "prompts":
        contexts = [0] * num_rows
    else:
        queries = [query if numbers.random() < 0.5 else 1 for query in queries]
    queries.sort()  # decodes stand first, however long a backend lets them be
    if numbers.random() < 0.3 and any(contexts):  # long enough to share pages
        contexts = [max(context, numbers.choice((64, 256))) for context in contexts]
    return queries, contexts
