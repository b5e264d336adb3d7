"""Backends that write or read where they must not, or lose what real calls bring: for `verify` to find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attn_backends.backends.torch.state import TorchState
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionBackend
from attn_backends.testing.verify.run import Outcome
from attn_backends.testing.verify.worker import Asked, run_seed
from tests.helpers.mutants import Backend, Common, mutant, other_batch, other_forward, other_scales, with_seq_lens
from tests.helpers.mutations import next_slot, padding_is_live


@dataclass(frozen=True)
class VerifyMutation:
    name: str
    backend: Backend
    told: str = ""  # what the finding says, as a regular expression


def outcomes(backend: type[AttentionBackend], seeds: Iterator[int] | range, size: str = "small") -> Iterator[Outcome]:
    asked = Asked(backend.get_name(), "cpu", size, None, ())
    return (run_seed(asked, backend, seed) for seed in seeds)


def first_finding(backend: type[AttentionBackend], seeds: range, size: str = "small") -> str:
    """What is found first; empty if nothing is."""
    return next((outcome.finding for outcome in outcomes(backend, seeds, size) if outcome.finding), "")


def row_beyond(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """One row behind the output is zeroed too."""
    output: torch.Tensor = forward(**given)
    output.as_strided((len(output) + 1, *output.shape[1:]), output.stride())[-1] = 0
    return output


def row_in_front(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """An LSE whose rows begin one too early."""
    output: torch.Tensor = forward(**given)
    if given.get("lse") is not None:
        lse = given["lse"]
        lse.as_strided(lse.shape, lse.stride(), lse.storage_offset() - lse.shape[1]).copy_(lse.clone())
    return output


def page_beyond(common: Common) -> Common:
    """Each row reads the page behind its last one."""
    return with_seq_lens(common, torch.where(common.seq_lens_cpu > 0, common.seq_lens_cpu + common.page_size, 0))


class StaleEntry(TorchMetadataBuilder):
    """The first entry of a page table is that of the step before."""

    last: torch.Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        common = common_attn_metadata
        if common.page_table.numel() and common.num_actual_reqs > 1:
            table, first = common.page_table.clone(), common.page_table[0, 0].clone()
            if self.last is not None:
                table[0, 0] = self.last
            self.last, common = first, replace(common, page_table=table, csr=None)
        return super().build(common_prefix_len, common, fast_build)


def caches_as_copies(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """A cache that does not lie in one piece is copied, and the copy written."""
    cache = given["kv_cache"]
    together = None if cache is None else KVCache(*(tensor.contiguous() for tensor in cache))
    return forward(**{**given, "kv_cache": together})  # type: ignore[no-any-return]


def fresh_memory_is_zero(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """A sum that is never set to zero."""
    output: torch.Tensor = forward(**given)
    return output + torch.empty_like(output)


def key_changed(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    if given["key"] is not None:
        given["key"][-1:] *= 0.5
    return forward(**given)  # type: ignore[no-any-return]


class HalfAWorkspace(TorchState):
    """A workspace for as many tokens as the limits say, of which half are allocated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own_rows = torch.empty(self.limits.max_num_tokens // 2 + 1)

    def begin_forward(self, metadata: Any) -> Any:
        self.own_rows.as_strided((metadata.slot_mapping.shape[0],), (1,)).fill_(0.0)
        return super().begin_forward(metadata)


class SinksOfTheFirstLayer(TorchImpl):
    """Every layer has the sinks that the last one before it had, if they are as many."""

    shared: dict[int, torch.Tensor] = {}  # noqa: RUF012 (the fault)

    def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> None:
        if sinks is not None:
            sinks = self.shared.setdefault(len(sinks), sinks)
        super().__init__(*args, sinks=sinks, **kwargs)


MUTATIONS = [
    VerifyMutation("output row written one beyond", other_forward(row_beyond), "behind it were written"),
    VerifyMutation("LSE row written one in front", other_forward(row_in_front), "before it were written|lse"),
    VerifyMutation("one page beyond read", other_batch(page_beyond)),
    VerifyMutation("stale page table entry", mutant(StaleEntry)),
    VerifyMutation("slot mapping off by one", other_batch(next_slot)),
    VerifyMutation("padding rows written", other_batch(padding_is_live), "slots of the|output"),
    VerifyMutation("workspace half as large", mutant(state_cls=HalfAWorkspace), "behind it"),
    VerifyMutation("caches copied", other_forward(caches_as_copies), "slots of the"),
    VerifyMutation("fresh memory taken for zeros", other_forward(fresh_memory_is_zero), "output"),
    VerifyMutation("an input changed", other_forward(key_changed), "was changed itself"),
    VerifyMutation("k_scale ignored", other_scales(lambda k, v: (1.0, v))),
    VerifyMutation("v_scale ignored", other_scales(lambda k, v: (k, 1.0))),
    VerifyMutation("sinks of another layer", mutant(impl=SinksOfTheFirstLayer)),
]
