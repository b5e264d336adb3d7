"""What a batch becomes for one plan group, and who makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
import torch.nn.functional as F

from attn_backends.batch.common import CommonAttentionMetadata, SequenceGroup
from attn_backends.batch.order import SwappableRows, leading_new_kv
from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.batch.placeholders import NO_PLACEHOLDERS, PlaceholderMaps, cut_maps
from attn_backends.interface.broadcast import flatten, rebuild
from attn_backends.interface.refusals import refuse_raw_options
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, PlanGroup


@dataclass(frozen=True)
class AttentionMetadata:
    """One step of one plan group: this step's tensors and host numbers. Rows are ordered decodes first, or not split.

    Frozen: a backend's subclass adds its own fields, and nothing changes them after `build`.
    """

    group_index: int  # PlanGroup.index of the layers that this serves
    num_decodes: int  # rows with at most `decode_threshold` query tokens, at the front
    num_decode_tokens: int
    num_decode_new_kv: int
    num_prefills: int
    num_prefill_tokens: int
    num_tokens: int  # padding included
    num_row_tokens: int  # those of rows, padded rows too; tokens behind them belong to no row
    num_new_kv: int
    slot_mapping: torch.Tensor  # [num_new_kv + padding] i64; -1 is never written
    common_prefix_len: int  # leading keys that all rows share, in the same pages; 0 for none
    is_profile_run: bool
    for_graph: bool  # all rows count as decodes, padding included: which it is, is known on the device alone
    multi_modal_placeholder_index_maps: PlaceholderMaps = field(default=NO_PLACEHOLDERS, kw_only=True)  # for the model
    is_mixed: bool = field(default=False, kw_only=True)  # of a graph's: rows have any query lengths
    planned_for: AttentionSpec | None = field(default=None, kw_only=True)  # the group's; None: any layer takes it

    @classmethod
    def of_batch(
        cls, common: CommonAttentionMetadata, group_index: int, num_decodes: int, *,
        num_decode_tokens: int | None = None, common_prefix_len: int = 0, **own: Any,
    ) -> Self:  # fmt: skip
        """A step of a batch that no graph runs.

        Args:
            num_decodes: rows at the front that count as decodes; the other live rows are prefills.
            num_decode_tokens: their query tokens; None: one each.
            own: the fields that the backend adds.
        """
        decode_tokens = num_decodes if num_decode_tokens is None else num_decode_tokens
        return cls(
            group_index=group_index,
            num_decodes=num_decodes,
            num_decode_tokens=decode_tokens,
            num_decode_new_kv=leading_new_kv(common, num_decodes),
            num_prefills=common.num_actual_reqs - num_decodes,
            num_prefill_tokens=common.num_actual_tokens - decode_tokens,
            num_tokens=common.num_tokens,
            num_row_tokens=common.num_tokens if common.num_reqs > common.num_actual_reqs else common.num_actual_tokens,
            num_new_kv=common.num_new_kv,
            slot_mapping=common.slot_mapping,
            common_prefix_len=common_prefix_len,
            is_profile_run=common.is_profile_run,
            for_graph=False,
            multi_modal_placeholder_index_maps=common.multi_modal_placeholder_index_maps,
            **own,
        )

    @classmethod
    def of_graph(
        cls, group_index: int, slot_mapping: torch.Tensor, num_rows: int, num_tokens: int, /, **own: Any
    ) -> Self:
        """A step that a graph runs, padding included: rows of equal query lengths, or with `is_mixed` of any, which all
        count as decodes. Without slots for all tokens, as cross attention has none for keys that it wrote before, the
        others are -1."""
        if len(slot_mapping) < num_tokens:
            slot_mapping = F.pad(slot_mapping, (0, num_tokens - len(slot_mapping)), value=PAD_SLOT)
        return cls(
            group_index=group_index,
            num_decodes=num_rows,
            num_decode_tokens=num_tokens,
            num_decode_new_kv=num_tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            num_tokens=num_tokens,
            num_row_tokens=num_tokens,
            num_new_kv=num_tokens,
            slot_mapping=slot_mapping,
            common_prefix_len=0,
            is_profile_run=False,
            for_graph=True,
            **own,
        )

    @property
    def decode_metadata(self) -> Self | None:
        """A view of the decode rows alone, or None without any."""
        if not self.num_decodes:
            return None
        tokens, new_kv = self.num_decode_tokens, self.num_decode_new_kv
        return replace(self, num_prefills=0, num_prefill_tokens=0, num_tokens=tokens, num_row_tokens=tokens,
                       num_new_kv=new_kv, slot_mapping=self.slot_mapping[:new_kv],
                       **self._placeholders_of(0, tokens), **self.decode_fields())  # fmt: skip

    @property
    def prefill_metadata(self) -> Self | None:
        """A view of the prefill rows alone, or None without any."""
        if not self.num_prefills:
            return None
        tokens, before = self.num_prefill_tokens, self.num_decode_new_kv
        return replace(self, num_decodes=0, num_decode_tokens=0, num_decode_new_kv=0, common_prefix_len=0,
                       num_tokens=tokens, num_row_tokens=tokens, num_new_kv=self.num_new_kv - before,
                       slot_mapping=self.slot_mapping[before : self.num_new_kv],
                       **self._placeholders_of(self.num_decode_tokens, self.num_tokens),
                       **self.prefill_fields())  # fmt: skip

    def _placeholders_of(self, first: int, stop: int) -> dict[str, Any]:
        maps = self.multi_modal_placeholder_index_maps
        return {"multi_modal_placeholder_index_maps": cut_maps(maps, first, stop)} if maps else {}

    def asdict_zerocopy(self, skip_fields: Collection[str] | None = None) -> dict[str, Any]:
        """What a driver sends its workers: every field by name, those of its rows by dotted names, no tensor copied.

        Args:
            skip_fields: names of fields to leave out, with all their parts.
        """
        return flatten(self, skip_fields or ())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """The metadata of `asdict_zerocopy`, such as a worker got it. `others`: fields that were left out there.

        Raises:
            TypeError: a field is in neither.
        """
        names = [each.name for each in fields(cls) if each.name in values and each.name not in others]
        return cls(**rebuild(values, names), **others)

    def decode_fields(self) -> dict[str, Any]:
        """The backend's own fields that `decode_metadata` changes, with their values there."""
        return {}

    def prefill_fields(self) -> dict[str, Any]:
        """The backend's own fields that `prefill_metadata` changes, with their values there."""
        return {}


MetadataT = TypeVar("MetadataT", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[MetadataT]):
    """Turns a batch into one plan group's metadata. Reusable over any batches; remembers no values of the last one.

    Args:
        group: the layers served; `group.spec` holds their constants.
        cache: page size and layout of the pool.
        limits: the most that one batch may hold.
        device: where the metadata's tensors live.
        options: the backend's own options, validated by `validate_options`; None for its defaults.
    """

    decode_threshold: int = 1  # most query tokens of a row that counts as decode; a builder may set fewer on itself
    needs_exact_lengths: ClassVar[bool] = False  # of every batch: `build` calls `check_lengths`

    def __init__(
        self, group: PlanGroup[Any], cache: KVCacheSpec, limits: Limits, device: torch.device | str, *,
        options: Any = None,
    ) -> None:  # fmt: skip
        refuse_raw_options(options)
        self.group = group
        self.cache = cache
        self.limits = limits
        self.device = torch.device(device)
        self.options = options

    def prepare(self) -> None:
        """Called before each `build` by drivers that do so, as vLLM V0's. A builder that collects anything between
        `prepare` and `build` overrides it; by default there is nothing to forget."""

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MetadataT:
        """Metadata of one step.

        Args:
            common_prefix_len: leading keys that all rows share in the same pages, a multiple of the page size.
            common_attn_metadata: the batch.
            fast_build: prefer a quick build over the quickest kernels.

        For a batch with `for_graph` set, nothing that kernels are launched with may depend on host lengths but the
        shapes. The metadata may bring lengths for the state to plan with.
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MetadataT:
        """Metadata to capture a graph with, from a batch of the padded shape. Replays are built by `build`."""
        return self.build(0, replace(common_attn_metadata, for_graph=True))

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether a batch within the backend's `Capabilities.cuda_graph` may replay a graph after all."""
        return True

    def reads_cached_keys(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether keys are in the cache, and new ones are the queries' own, as in every graph: cross attention writes
        an encoder's at its first step, and its later steps are served."""
        common, kind = common_attn_metadata, self.group.spec.attention_type
        is_later = kind is AttentionType.CROSS and not common.num_new_kv
        return not common.is_profile_run and (kind is AttentionType.DECODER or is_later)

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Bring a batch's rows, of `query_lens` new tokens each, into the order this builder wants.

        Returns whether rows changed places. The default wants none: any order is served.
        """
        return False

    def needs_lengths_of(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether this batch is planned with exact lengths on the host, so that `build` refuses it if it knows upper
        bounds alone. By default that is the same for all batches."""
        return self.needs_exact_lengths

    def check_batch(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        """Refuse what this builder's layers and their state were not made for. `build` calls it first.

        Raises:
            ValueError: pages of another size than the pool's; more rows, tokens or keys than the limits, where it is
                known how many and they are a decoder's own; see also `check_lengths`.
        """
        common = common_attn_metadata
        if common.page_size != self.cache.page_size:
            raise ValueError(
                f"the batch is made for pages of {common.page_size} slots, and the pool has pages of "
                f"{self.cache.page_size}: make it with the pool's page_size"
            )
        is_known = self.group.spec.attention_type is AttentionType.DECODER and not common.seq_lens_are_upper_bounds
        self.limits.check(common.num_reqs, common.num_tokens, common.max_seq_len if is_known else 0)
        self.check_lengths(common)

    def check_lengths(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        """Refuse upper bounds where exact lengths are needed.

        Raises:
            ValueError: `needs_lengths_of` the batch, and it knows upper bounds alone.
        """
        if common_attn_metadata.seq_lens_are_upper_bounds and self.needs_lengths_of(common_attn_metadata):
            raise ValueError(
                f"{type(self).__name__} plans with exact lengths on the host, and this batch knows upper bounds alone "
                "(seq_lens_are_upper_bounds): wait for the lengths, or choose a backend that reads them on the device"
            )

    def build_from_groups(
        self, groups: Sequence[SequenceGroup], num_padded_reqs: int = 0, common_prefix_len: int = 0
    ) -> MetadataT:
        """The scheduler's road: compile the groups, then `build`. Equal to compiling them yourself."""
        common = CommonAttentionMetadata.from_sequence_groups(
            groups, self.cache.page_size, self.device, num_padded_reqs, num_pages=self.cache.num_pages
        )
        return self.build(common_prefix_len, common)
