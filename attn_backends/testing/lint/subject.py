"""The backend under lint, the random batches that it is given, and what one step of it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from attn_backends.interface import AttentionMetadataBuilder, Capabilities, Rejection
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, plan_groups
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.features import FLOATS, plain_cache, plain_spec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Backend, Result, run_backend
from attn_backends.testing.lint.judge import Drawn
from attn_backends.testing.verify.sizes import interprets_triton

Rows = list[tuple[int, int]]  # (keys in the cache before the step, query tokens) of each row


@dataclass(frozen=True)
class BatchKind:
    """A kind of batch: its rows by chance, and how it comes."""

    name: str
    rows: Callable[[Random], Rows]
    cached: bool = True  # False: a profile run
    num_padded_reqs: int = 0


def _mixed(numbers: Random) -> Rows:
    decodes = [(numbers.randint(20, 60), 1) for _ in range(2)]
    return [*decodes, (numbers.randint(18, 40), numbers.randint(5, 20)), (0, numbers.randint(18, 33))]


KINDS = (
    BatchKind("decodes", lambda numbers: [(numbers.randint(17, 70), 1) for _ in range(3)]),
    BatchKind("tokens to verify", lambda numbers: [(numbers.randint(17, 50), 3) for _ in range(2)]),
    BatchKind("whole prompts", lambda numbers: [(0, numbers.randint(20, 45)) for _ in range(2)]),
    BatchKind("decodes and chunks of prompts", _mixed),
    BatchKind("a profile run", lambda numbers: [(0, numbers.randint(20, 45)) for _ in range(2)], cached=False),
    BatchKind("padded decodes", lambda numbers: [(numbers.randint(17, 70), 1) for _ in range(3)], num_padded_reqs=2),
    BatchKind("one long decode", lambda numbers: [(numbers.randint(500, 700), 1)]),
)
FEW_KINDS = (KINDS[0], KINDS[3])  # where a step takes long


@dataclass(frozen=True)
class Subject:
    """A backend, where it runs, and the number that all chance comes from."""

    backend: Backend
    device: str = "cpu"
    seed: int = 0
    options: Any = None  # of the backend, validated

    @property
    def can(self) -> Capabilities:
        return self.backend.capabilities()

    @property
    def name(self) -> str:
        return self.backend.get_name()

    @property
    def is_slow(self) -> bool:
        """Whether a step takes long, so that fewer are run."""
        return interprets_triton() and "TRITON" in self.name

    @property
    def kinds(self) -> tuple[BatchKind, ...]:
        return FEW_KINDS if self.is_slow else KINDS

    @property
    def cache(self) -> KVCacheSpec:
        return plain_cache(self.can)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The declared floats, widest use first."""
        return [dtype for dtype in FLOATS if dtype in self.can.dtypes]

    def numbers(self, *what: object) -> Random:
        return Random(" ".join(map(str, (self.seed, *what))))

    def spec(self, **changes: Any) -> AttentionSpec:
        """The plain layer, changed."""
        return plain_spec(self.can, **{"dtype": self.dtypes[0], **changes})

    def rejected(self, spec: AttentionSpec, **cache: Any) -> list[Rejection]:
        """Why such a layer is refused, over the plain cache, changed."""
        return self.backend.reject(spec, replace(self.cache, **cache), self.device)

    def batch(self, spec: AttentionSpec, kind: BatchKind, numbers: Random, **how: Any) -> Batch:
        """A random batch of a kind; for cross attention its rows have keys of an encoder."""
        rows = kind.rows(numbers)
        queries = [query for _, query in rows]
        seq_lens = [context + query for context, query in rows]
        if spec.attention_type is AttentionType.CROSS:
            seq_lens = [context or query for context, query in rows]
        cache = self.cache
        given = {"page_size": cache.page_size, "layout": cache.layout, "device": self.device, "cached": kind.cached,
                 "fp8_queries": self.can.fp8_queries, "seed": numbers.randrange(1 << 30), **how}  # fmt: skip
        return random_batch(self.backend, spec, seq_lens, queries, **given)

    def run(self, batch: Batch, want_lse: bool = False, num_padded_reqs: int = 0, prefix_len: int = 0) -> Result:
        """One step, from new objects."""
        how = {"num_padded_reqs": num_padded_reqs, "options": self.options, "want_lse": want_lse}
        return run_backend(self.backend, batch, common_prefix_len=prefix_len, **how)

    def builder(self, batch: Batch, limits: Limits) -> AttentionMetadataBuilder[Any]:
        """A new one, of the batch's layer."""
        group, builder_cls = plan_groups({0: batch.spec})[0], self.backend.get_builder_cls()
        return builder_cls(group, batch.cache, limits, batch.device, options=self.options)

    def honours(self, drawn: Drawn, num_padded_reqs: int = 0) -> bool:
        """Whether a step that nobody may ask for is right, and not refused in some way of its own."""
        return drawn.failure(lambda: self.run(drawn.batch, num_padded_reqs=num_padded_reqs)) is None
