"""The five classes of a backend, what a backend can say of itself, and the step that layers receive.

    scheduler ─SequenceGroups─▶ CommonAttentionMetadata ─▶ builder ─Metadata─▶ state.begin_forward ─Step─▶ impl × layers

A backend is a static class that names the four others. Builders are pure; one state owns everything that lasts.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch

from attn_backends.batch import CommonAttentionMetadata, SequenceGroup
from attn_backends.batch_order import SwappableRows
from attn_backends.derive import StepBuffers
from attn_backends.devices import Progress, compute_capability, gpu_name, has_gpu
from attn_backends.kv_cache import KVCache
from attn_backends.mla_spec import MLASpec
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Layout, Limits, PlanGroup


class CudaGraphSupport(enum.IntEnum):
    """Which batches a backend can run inside a captured CUDA graph; a higher level includes the lower ones."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # one query token a row
    UNIFORM_BATCH = 2  # the same number of query tokens in every row, as in speculative verify
    ALWAYS = 3  # mixed batches too


@dataclass(frozen=True)
class Rejection:
    """One reason why a backend cannot serve a layer: what was asked, what is possible, what to type next."""

    code: str  # stable, machine-readable: "head_dim", "page_size", "sinks", …
    got: str
    supported: str
    hint: str

    def __str__(self) -> str:
        return f"{self.code}: got {self.got}; supported: {self.supported}. {self.hint}"


class Unsupported(NotImplementedError):
    """A backend was asked for something it declares it cannot do; `rejections` says what, and what it can."""

    def __init__(self, backend: str, rejections: Sequence[Rejection]) -> None:
        super().__init__(backend, tuple(rejections))
        self.backend = backend
        self.rejections = tuple(rejections)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.backend} cannot serve this:", *map(str, self.rejections)])


@dataclass(frozen=True)
class Capabilities:
    """What a backend honours. `None` for a set means any value. What is not declared here is refused, never dropped."""

    devices: frozenset[str]  # torch device types
    dtypes: frozenset[torch.dtype]  # of queries and outputs
    cache_dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    page_size_multiple: int = 1
    layouts: frozenset[Layout] = frozenset({"NHD"})
    attention_types: frozenset[AttentionType] = frozenset({AttentionType.DECODER})
    window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    chunks: bool = False  # AttentionSpec.chunk_size
    non_causal: bool = False  # of a decoder layer
    unequal_head_dims: bool = False  # head_dim_vo != head_dim
    lse: bool = False  # Impl.forward fills `lse`
    output_scale: bool = False  # Impl.forward quantises its output
    fp8_queries: bool = False  # over an fp8 cache it rounds queries and weights to fp8 too: errors of some per cent
    cascade: bool = False  # uses common_prefix_len; without it the value is only a hint that changes nothing
    cuda_graph: CudaGraphSupport = CudaGraphSupport.NEVER
    min_compute_capability: tuple[int, int] | None = None
    head_counts: frozenset[int] | None = None  # num_qo_heads
    mla: bool = False  # serves layers of MLASpec, and no others
    kv_lora_ranks: frozenset[int] | None = None
    qk_rope_head_dims: frozenset[int] | None = None
    # A query whose q·k, with the scale or without, all lie below may come back as one that sees no key.
    lowest_logit: float = -math.inf


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


def mismatches(can: Capabilities, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device) -> list[Rejection]:
    """What a layer asks for that these capabilities do not have."""
    if isinstance(spec, MLASpec) != can.mla:  # another kind of layer: further comparisons would mean nothing
        got, served = ("MLA (a latent cache)", "plain attention")[:: -1 if can.mla else 1]
        return [Rejection("mla", got, served, f"Choose AUTO, or a backend for {got}: attn-backends list.")]
    asked: list[tuple[str, Hashable, frozenset[Any] | None, str]] = [
        ("device", device.type, can.devices, "Set device to one of these."),
        ("dtype", spec.dtype, can.dtypes, "Load the model in one of these."),
        ("cache_dtype", spec.cache_dtype, can.cache_dtypes, "Set cache.dtype to one of these."),
        ("num_qo_heads", spec.num_qo_heads, can.head_counts, "Choose a backend that takes so many heads."),
        ("head_dim", spec.head_dim, can.head_dims, "Choose a backend that takes this head_dim."),
        ("head_dim_vo", spec.head_dim_vo, can.head_dims, "Choose a backend that takes this head_dim_vo."),
        ("page_size", cache.page_size, can.page_sizes, "Set cache.page_size to one of these."),
        ("layout", cache.layout, can.layouts, "Set cache.layout to one of these."),
        ("attention_type", spec.attention_type, can.attention_types, "Choose a backend that serves this type."),
    ]
    found = [
        Rejection(code, _word(got), ", ".join(sorted(map(_word, allowed), key=lambda word: word.rjust(5))), hint)
        for code, got, allowed, hint in asked
        if allowed is not None and got not in allowed
    ]
    if cache.page_size % (multiple := can.page_size_multiple):
        found.append(Rejection("page_size", str(cache.page_size), f"multiples of {multiple}",
                               f"Set cache.page_size to {multiple}."))  # fmt: skip
    features = [
        ("window", spec.window_left >= 0, can.window, f"window_left={spec.window_left}"),
        ("soft_cap", spec.logits_soft_cap is not None, can.soft_cap, f"logits_soft_cap={spec.logits_soft_cap}"),
        ("alibi", spec.alibi_slopes is not None, can.alibi, "alibi_slopes"),
        ("sinks", spec.sinks, can.sinks, "sinks"),
        ("chunks", spec.chunk_size is not None, can.chunks, f"chunk_size={spec.chunk_size}"),
        ("non_causal", spec.attention_type is AttentionType.DECODER and not spec.causal, can.non_causal,
         "causal=False"),
        ("unequal_head_dims", spec.head_dim != spec.head_dim_vo, can.unequal_head_dims,
         f"head_dim={spec.head_dim}, head_dim_vo={spec.head_dim_vo}"),
    ]  # fmt: skip
    found += [
        Rejection(code, got, "layers without it", "Choose a backend that honours it: attn-backends list.")
        for code, wanted, honoured, got in features
        if wanted and not honoured
    ]
    return found + gpu_mismatches(can, device)


def gpu_mismatches(can: Capabilities, device: torch.device) -> list[Rejection]:
    """What a GPU lacks that these capabilities need.

    A compute capability is NVIDIA's: a backend that needs one is refused on AMD's GPUs, which torch calls cuda too.
    """
    if device.type != "cuda" or "cuda" not in can.devices:
        return []
    if not has_gpu(device):
        return [Rejection("device", str(device), "devices that are here", "Set device to cpu, or mend CUDA.")]
    needed, capability = can.min_compute_capability, compute_capability(device)
    if needed and capability is None:
        got = f"{gpu_name(device)} (ROCm/HIP {torch.version.hip})"
        return [Rejection("device", got, "NVIDIA's GPUs (CUDA)", "On ROCm/HIP it has not been tried: use TORCH, or "
                          "TORCH_MLA for MLA.")]  # fmt: skip
    if needed and capability and capability < needed:
        got, since = (".".join(map(str, pair)) for pair in (capability, needed))
        return [Rejection("compute_capability", got, f"{since} and newer", "Use a newer GPU or another backend.")]
    return []


def _word(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value).removeprefix("torch.")
