"""A step as engines of the `req_to_token` convention describe it, brought to rows of known lengths."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from attn_backends.batch.page_table import IntArray
from attn_backends.interface.capabilities import Rejection, Unsupported

HostLens = torch.Tensor | Sequence[int]  # on the host


class ForwardMode(enum.Enum):
    """What a step does. An engine's own modes are known by these names."""

    EXTEND = "extend"  # prompts, whole or in chunks, behind what is cached of them
    MIXED = "mixed"  # the same, with decoding rows among them
    DECODE = "decode"  # one new token a row
    TARGET_VERIFY = "target_verify"  # as many drafted tokens in every row, one after the other
    IDLE = "idle"  # no rows

    @staticmethod
    def of(mode: object) -> ForwardMode:
        """Our mode of the same name.

        Raises:
            ValueError: there is none.
        """
        name = str(getattr(mode, "name", mode)).upper()
        if name not in ForwardMode.__members__:
            raise ValueError(f"forward_mode is {mode!r}; served: {', '.join(ForwardMode.__members__)}")
        return ForwardMode[name]


class ForwardBatchLike(Protocol):
    """What every batch has. `ForwardBatch` names what else is read where a batch has it."""

    @property
    def forward_mode(self) -> object: ...
    @property
    def req_pool_indices(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def seq_lens_cpu(self) -> HostLens | None: ...
    @property
    def out_cache_loc(self) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """A step of R rows and T new tokens, for an engine that has no such class. Lengths are decoder tokens alone."""

    forward_mode: object
    req_pool_indices: torch.Tensor  # [R] int, which rows of req_to_token
    seq_lens: torch.Tensor  # [R] int; with the new tokens, but for drafts that are being verified
    out_cache_loc: torch.Tensor  # [T] int, slots of the new tokens; 0 for padding
    seq_lens_cpu: HostLens | None = None  # [R], the same on the host
    extend_prefix_lens_cpu: HostLens | None = None  # [R] tokens that are cached already, in an extend; None: none are
    encoder_lens: torch.Tensor | None = None  # [R] int, tokens of the encoder at the front of a row
    encoder_lens_cpu: HostLens | None = None  # [R], the same on the host
    encoder_out_cache_loc: torch.Tensor | None = None  # slots of the encoder's tokens that this step writes
    req_pool_indices_cpu: HostLens | None = None  # [R], on the host: neighbours in the table are then read in place
    token_to_kv_pool: Any = None  # a `KVPool`, for an adapter that has none


@dataclass(frozen=True, eq=False)
class StepRows:
    """A step's rows over `req_to_token`: all that metadata is made of."""

    req_pool_indices: torch.Tensor  # [R] int
    seq_lens: torch.Tensor  # [R] i32, with the new tokens
    seq_lens_cpu: IntArray  # [R] i32
    query_lens: IntArray  # [R] i32
    num_tokens: int  # T
    req_pool_indices_cpu: HostLens | None = None
    encoder_lens: torch.Tensor | None = None  # [R] i32
    encoder_lens_cpu: IntArray | None = None  # [R] i32; None without encoder_lens
    are_upper_bounds: bool = False  # what is on the host may exceed what is on the device
    for_graph: bool = False


def step_rows(batch: ForwardBatchLike, max_context_len: int) -> StepRows:
    """The rows of an eager step; without lengths on the host, their bound stands for them where queries do not matter.

    Raises:
        ValueError: lengths that a step of this mode needs are missing, elsewhere, or do not fit the slots.
        Unsupported: the drafts are a tree.
    """
    # Drafts are verified as a chain: each attends to those before it.
    if getattr(getattr(batch, "spec_info", None), "custom_mask", None) is not None:
        hint = "Draft one token a step (topk 1), and leave custom_mask out."
        raise Unsupported("req_to_token", [Rejection("custom_mask", "a tree of drafts", "a chain of drafts", hint)])
    mode, num_rows, slots = ForwardMode.of(batch.forward_mode), len(batch.req_pool_indices), batch.out_cache_loc
    prefix_lens = getattr(batch, "extend_prefix_lens_cpu", None)
    encoder_lens = getattr(batch, "encoder_lens", None)
    if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        seq_lens_cpu = host_lens("seq_lens_cpu", batch.seq_lens_cpu, num_rows)
        prefixes = np.zeros_like(seq_lens_cpu)
        if prefix_lens is not None:
            prefixes = host_lens("extend_prefix_lens_cpu", prefix_lens, num_rows)
        query_lens = seq_lens_cpu - prefixes
        check_extend(query_lens, prefixes, len(slots), prefix_lens is not None)
    else:
        query_lens = uniform_query_lens(mode, num_rows, len(slots))
    encoder_lens_cpu = getattr(batch, "encoder_lens_cpu", None)
    given = GivenRows(batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu, encoder_lens, encoder_lens_cpu)
    rows = given.with_queries(mode, query_lens, max_context_len)
    return replace(rows, req_pool_indices_cpu=getattr(batch, "req_pool_indices_cpu", None))


class GivenRows(NamedTuple):
    """Rows as an engine gives them. A graph's tensors may be longer; the first rows count."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: HostLens | None
    encoder_lens: torch.Tensor | None
    encoder_lens_cpu: HostLens | None

    def first(self, num_rows: int) -> GivenRows:
        return GivenRows(*(None if each is None else each[:num_rows] for each in self))  # type: ignore[arg-type]

    def with_queries(self, mode: ForwardMode, query_lens: IntArray, max_context_len: int) -> StepRows:
        """Rows of known query lengths, an encoder's tokens in front. In a verify `seq_lens` come without the drafts, as
        engines count them.

        Raises:
            ValueError: the encoder's lengths are on the device alone.
        """
        num_rows, drafts = len(query_lens), int(query_lens[0]) if mode is ForwardMode.TARGET_VERIFY else 0
        if self.seq_lens_cpu is None:
            lens_cpu = np.full(num_rows, max_context_len, np.int32)
        else:
            lens_cpu = host_lens("seq_lens_cpu", self.seq_lens_cpu, num_rows) + np.int32(drafts)
        lens = self.seq_lens.to(torch.int32, copy=True)  # an engine writes its next step's into the same tensor
        rows = StepRows(
            self.req_pool_indices, lens + drafts if drafts else lens, lens_cpu, query_lens, int(query_lens.sum()),
            are_upper_bounds=self.seq_lens_cpu is None,
        )  # fmt: skip
        if self.encoder_lens is None:
            return rows
        encoder_lens_cpu = host_lens("encoder_lens_cpu", self.encoder_lens_cpu, num_rows)
        return replace(rows, encoder_lens=self.encoder_lens.to(torch.int32), encoder_lens_cpu=encoder_lens_cpu)


def host_lens(name: str, lens: HostLens | None, num_rows: int) -> IntArray:
    """[num_rows] i32 on the host.

    Raises:
        ValueError: there are none, they are on a device, or not one a row.
    """
    if lens is None or (isinstance(lens, torch.Tensor) and lens.device.type != "cpu"):
        where = "missing" if lens is None else "not on the host"
        raise ValueError(
            f"{name} is {where}: this step is planned with lengths on the host, and reading them from the device would "
            f"wait for it. Pass {name}, one length a row, as a CPU tensor or a list"
        )
    found = np.array(lens.numpy() if isinstance(lens, torch.Tensor) else lens, np.int32)  # a copy: engines reuse theirs
    if found.shape != (num_rows,):
        raise ValueError(f"{name} has shape {list(found.shape)}; the step has {num_rows} rows: pass one length a row")
    return found


def uniform_query_lens(mode: ForwardMode, num_rows: int, num_tokens: int) -> IntArray:
    """[num_rows] i32: one token a row, or in a verify as many as there are slots for.

    Raises:
        ValueError: tokens and rows do not go together.
    """
    query_len = num_tokens // num_rows if mode is ForwardMode.TARGET_VERIFY else 1
    if query_len < 1 or query_len * num_rows != num_tokens:
        wanted = "as many drafts in every row" if mode is ForwardMode.TARGET_VERIFY else "one token a row"
        raise ValueError(
            f"{mode.name} of {num_rows} rows and {num_tokens} tokens (the length of out_cache_loc, or num_tokens): "
            f"need {wanted}; steps of unequal rows are EXTEND"
        )
    return np.full(num_rows, query_len, np.int32)


def check_extend(query_lens: IntArray, prefixes: IntArray, num_slots: int, has_prefixes: bool) -> None:
    """Refuse rows without a new token, and lengths that are not those of the slots."""
    if query_lens.min(initial=1) < 1 or prefixes.min(initial=0) < 0 or int(query_lens.sum()) != num_slots:
        hint = "" if has_prefixes else ". Pass extend_prefix_lens_cpu: without it no row has a prefix"
        raise ValueError(
            f"rows with {query_lens.tolist()} new tokens (seq_lens_cpu less extend_prefix_lens_cpu), and {num_slots} "
            f"slots in out_cache_loc: need at least 1 new token a row, and a slot for each{hint}"
        )
