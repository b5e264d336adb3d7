"""The five classes of a backend, and the step that layers receive; `capabilities` has what a backend says of itself.

    scheduler ─SequenceGroups─▶ CommonAttentionMetadata ─▶ builder ─Metadata─▶ state.begin_forward ─Step─▶ impl × layers

A backend is a static class that names the four others. Builders are pure; one state owns everything that lasts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch

from attn_backends.batch import CommonAttentionMetadata, SequenceGroup
from attn_backends.batch_order import SwappableRows
from attn_backends.capabilities import Capabilities, Rejection, Unsupported, mismatches
from attn_backends.derive import StepBuffers
from attn_backends.devices import Progress
from attn_backends.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, KVCacheSpec, Layout, Limits, PlanGroup


@dataclass(frozen=True)
class AttentionMetadata:
    """One step of one plan group: this step's tensors and host numbers. Rows are ordered decodes first, or not split.

    Frozen: a backend's subclass adds its own fields, and nothing changes them after `build`.
    """

    group_index: int  # PlanGroup.index of the layers that this serves
    num_decodes: int  # rows with at most `decode_threshold` query tokens, at the front
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    slot_mapping: torch.Tensor  # [num_new_kv + padding] i64; -1 is never written
    common_prefix_len: int  # leading keys that all rows share, in the same pages; 0 for none
    is_profile_run: bool

    @property
    @abstractmethod
    def decode_metadata(self) -> AttentionMetadata | None:
        """A view of the decode rows alone, or None without any."""

    @property
    @abstractmethod
    def prefill_metadata(self) -> AttentionMetadata | None:
        """A view of the prefill rows alone, or None without any."""


MetadataT = TypeVar("MetadataT", bound=AttentionMetadata)


@dataclass(frozen=True)
class AttentionStep(Generic[MetadataT]):
    """What every layer's Impl receives: metadata bound to what the state planned for it (a subclass adds wrappers)."""

    metadata: MetadataT


class AttentionMetadataBuilder(ABC, Generic[MetadataT]):
    """Turns a batch into one plan group's metadata. Reusable over any batches; remembers no values of the last one.

    Args:
        group: the layers served; `group.spec` holds their constants.
        cache: page size and layout of the pool.
        limits: the most that one batch may hold.
        device: where the metadata's tensors live.
        options: the backend's own options, validated (see the registry); None for its defaults.
    """

    decode_threshold: ClassVar[int] = 1  # most query tokens of a row that counts as decode
    needs_exact_lengths: ClassVar[bool] = False  # refuses a batch whose host lengths are upper bounds

    def __init__(
        self, group: PlanGroup[Any], cache: KVCacheSpec, limits: Limits, device: torch.device | str, *,
        options: Any = None,
    ) -> None:  # fmt: skip
        self.group = group
        self.cache = cache
        self.limits = limits
        self.device = torch.device(device)
        self.options = options

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

    def reorder_batch(self, batch: SwappableRows, query_lens: Sequence[int]) -> bool:
        """Bring a batch's rows, of `query_lens` new tokens each, into the order this builder wants.

        Returns whether rows changed places. The default wants none: any order is served.
        """
        return False

    def check_lengths(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        """Refuse upper bounds where exact lengths are needed.

        Raises:
            ValueError: `needs_exact_lengths`, and the batch knows upper bounds alone.
        """
        if self.needs_exact_lengths and common_attn_metadata.seq_lens_are_upper_bounds:
            raise ValueError(
                f"{type(self).__name__} plans with exact lengths on the host, and this batch knows upper bounds alone "
                "(seq_lens_are_upper_bounds): wait for the lengths, or choose a backend that reads them on the device"
            )

    def build_from_groups(
        self, groups: Sequence[SequenceGroup], num_padded_reqs: int = 0, common_prefix_len: int = 0
    ) -> MetadataT:
        """The scheduler's road: compile the groups, then `build`. Equal to compiling them yourself."""
        common = CommonAttentionMetadata.from_sequence_groups(
            groups, self.cache.page_size, self.device, num_padded_reqs
        )
        return self.build(common_prefix_len, common)


class AttentionState(ABC, Generic[MetadataT]):
    """Everything that outlives a step: workspaces, persistent buffers, plans, graphs. One for all plan groups.

    Sized once, from `limits`, as the largest need of all groups. Arguments as for the builder, with all `groups`.
    """

    backend_name: ClassVar[str]

    def __init__(
        self, groups: Sequence[PlanGroup[Any]], cache: KVCacheSpec, limits: Limits, device: torch.device | str, *,
        options: Any = None,
    ) -> None:  # fmt: skip
        self.groups = tuple(groups)
        self.cache = cache
        self.limits = limits
        self.device = torch.device(device)
        self.options = options

    @abstractmethod
    def begin_forward(self, metadata: MetadataT) -> AttentionStep[MetadataT]:
        """Plan one group's step. Called once a step and group, before its layers run; the only place that plans."""

    def move_to_current_stream(self) -> None:
        """Let the current CUDA stream take over from the one on which steps began so far: it waits for that one. There
        is nothing to do where every stream has a workspace of its own, or steps share none."""

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every kernel that steps within the limits can launch, so that none is compiled once requests come.
        Call it while an engine loads; calling it again takes little time. By default there is nothing to compile.

        Args:
            progress: told after each kernel how many are done, of how many, and its name.

        Raises:
            RuntimeError: a kernel cannot be compiled for this GPU.
        """

    # CUDA graphs. `with graph_capture(n)` holds the persistent buffers; `graph_clone(size)` is the state of one size
    # that is captured. Its `begin_forward`, at capture and at replay, fills them, plans, and returns a step over them.

    def graph_capture(self, max_batch_size: int, inputs: StepBuffers | None = None) -> AbstractContextManager[None]:
        """Hold the buffers for capturing decode graphs of up to `max_batch_size` rows. They stay, and never grow.

        Graphs may read `inputs`, a step table's tensors, where they are: then all batches have to be of that table.
        """
        self._no_graphs()

    def graph_clone(self, batch_size: int, query_len: int = 1) -> AttentionState[MetadataT]:
        """The state that one captured size keeps: `batch_size` rows of `query_len` tokens each."""
        self._no_graphs()

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, query_len: int = 1, group_index: int = 0
    ) -> MetadataT:
        """Metadata of one plan group to capture with, over the persistent buffers, without a builder or a batch."""
        self._no_graphs()

    def get_graph_input_buffers(self, metadata: MetadataT) -> dict[str, torch.Tensor]:
        """The persistent tensors that a captured graph reads, by the name of what fills them."""
        self._no_graphs()

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: MetadataT) -> None:
        """Fill the persistent tensors with a step's. Device to device: it reads nothing on the host."""
        self._no_graphs()

    def _no_graphs(self) -> NoReturn:
        raise Unsupported(
            self.backend_name,
            [Rejection("cuda_graph", "graph capture", "eager only", "Run eager: set graphs to none.")],
        )


def check_capture_size(batch_size: int, query_len: int, limits: Limits, held_rows: int | None = None) -> None:
    """What every state asks before it allocates graph buffers, or a clone over those that it holds for `held_rows`.

    Raises:
        ValueError: the size is not positive, or above the limits that the state was sized from.
        RuntimeError: the buffers hold fewer rows; none outside of a capture.
    """
    if batch_size < 1 or query_len < 1:
        raise ValueError(f"a graph of {batch_size} rows of {query_len} tokens: both must be at least 1")
    if batch_size > limits.max_num_requests or batch_size * query_len > limits.max_num_tokens:
        raise ValueError(
            f"a graph of {batch_size} rows of {query_len} tokens is above the limits (max_num_requests "
            f"{limits.max_num_requests}, max_num_tokens {limits.max_num_tokens}): capture smaller sizes, or raise these"
        )
    if held_rows is not None and batch_size > held_rows:
        raise RuntimeError(
            f"graph buffers never grow: clone {batch_size} rows inside `with state.graph_capture({batch_size})`"
        )


class AttentionImpl(ABC, Generic[MetadataT]):
    """One layer's attention. Holds the layer's constants, nothing of a step; never syncs with the device.

    Args:
        spec, cache: the layer and the pool.
        device: where it runs.
        sinks: [num_qo_heads] float, needed exactly if `spec.sinks`.
        k_scale, v_scale: a cached value times its scale is the real one, whatever the cache's dtype. Keys and values of
            this step are real ones: they are divided when they are written.
        options: the backend's own options, validated; None for its defaults.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device | str,
        *,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        options: Any = None,
    ) -> None:
        if (sinks is not None) != spec.sinks or (sinks is not None and sinks.shape != (spec.num_qo_heads,)):
            got = "no tensor" if sinks is None else f"shape {tuple(sinks.shape)}"
            raise ValueError(
                f"sinks: got {got} where spec.sinks is {spec.sinks}; pass [{spec.num_qo_heads}] exactly then"
            )
        if not (k_scale > 0 and v_scale > 0):
            raise ValueError(f"k_scale ({k_scale}) and v_scale ({v_scale}) must be positive")
        self.spec = spec
        self.cache = cache
        self.device = torch.device(device)
        self.options = options
        self.sinks = None if sinks is None else sinks.contiguous()
        self.k_scale = k_scale
        self.v_scale = v_scale

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor | None,  # [num_new_kv, num_kv_heads, head_dim]; None: nothing new to write
        value: torch.Tensor | None,  # [num_new_kv, num_kv_heads, head_dim_vo]; both are latent rows in MLA
        kv_cache: KVCache | None,  # None in a profile run and for encoder attention
        step: AttentionStep[MetadataT],
        output: torch.Tensor | None = None,  # [num_tokens, num_qo_heads, head_dim_vo], written in place
        *,
        lse: torch.Tensor | None = None,  # [num_tokens, num_qo_heads] f32, natural log, written in place
        output_scale: float | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values to their slots, attend, and return `output` (allocated if None).

        Padded rows come back as zeros. `lse` is the log of the softmax denominator, sinks included.
        Raises `Unsupported` for an argument the backend does not honour.
        """

    # Optional, for a compiler that puts attention into a model's graph: `forward` again, as plain torch operations.

    def trace_inputs(self, metadata: MetadataT) -> tuple[torch.Tensor, ...] | None:
        """All that `trace` reads of a step, the same for every layer of the plan group.

        None for a step that `forward` alone can run; by default that is any. Dtypes and dimensions never change, sizes
        may, and are 2 or more.
        """
        return None

    def trace(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_vo]
        kv_cache: KVCache,
        inputs: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Write the new keys and values, attend, and return [num_tokens, num_qo_heads, head_dim_vo].

        torch.compile traces it once, for any sizes: no branch on values, no Python state. Padded rows may come back
        as anything finite.
        """
        raise NotImplementedError(f"{type(self).__name__} traces no step")


class AttentionBackend(ABC):
    """A name, four classes and some facts. Static: it is never instantiated and holds no tensors."""

    def __new__(cls, *args: object, **kwargs: object) -> AttentionBackend:
        raise TypeError(f"{cls.__name__} is static: call its methods on the class")

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The registry name, in upper case."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_state_cls() -> type[AttentionState[Any]]: ...

    @staticmethod
    @abstractmethod
    def capabilities() -> Capabilities: ...

    @staticmethod
    def get_kv_cache_shapes(spec: AttentionSpec, cache: KVCacheSpec) -> tuple[tuple[int, ...], ...]:
        """Logical shapes of one layer's key and value cache: [num_pages, page_size, num_kv_heads, dim]."""
        rows = (cache.num_pages, cache.page_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), (*rows, spec.head_dim_vo)

    @staticmethod
    def get_kv_cache_stride_order(layout: Layout) -> tuple[int, ...]:
        """Logical dimensions in the order they lie in memory, outermost first."""
        return (0, 1, 2, 3) if layout == "NHD" else (0, 2, 1, 3)

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """Every reason why this backend cannot serve such a layer here; empty if it can.

        Compares the layer with `capabilities()`. A backend extends it for what a table of sets cannot say.
        """
        return mismatches(cls.capabilities(), spec, cache, torch.device(device))

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: Any
    ) -> list[Rejection]:
        """`reject`, and what the backend's own options, validated, rule out; by default that is nothing."""
        return cls.reject(spec, cache, device)

    @classmethod
    def note(cls, device: torch.device | str) -> str:
        """What is worth knowing of a backend that serves, for the reason of its choice; by default nothing."""
        return ""
