"""What a backend can say of itself, and how it refuses what it cannot do."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.machine import compute_capability, gpu_name, has_gpu
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec, Layout, MLASpec, dtype_name


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
    alibi: bool = False  # any slopes
    standard_alibi: bool = False  # the slopes of ALiBi's paper (`spec.alibi_slopes`), which `alibi` includes
    rope: bool = False  # AttentionSpec.pos_encoding_mode: queries and keys are rotated inside attention
    sinks: bool = False
    chunks: bool = False  # AttentionSpec.chunk_size
    non_causal: bool = False  # of a decoder layer
    unequal_head_dims: bool = False  # head_dim_vo != head_dim
    any_scale: bool = False  # AttentionSpec.scale of 0 and below, by which a hidden key's -inf is not to be multiplied
    lse: bool = False  # Impl.forward fills `lse`
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
    return found + _missing_features(can, spec) + gpu_mismatches(can, device)


def _missing_features(can: Capabilities, spec: AttentionSpec) -> list[Rejection]:
    """What a layer asks for that is honoured or not, without a choice of values."""
    features = [
        ("window", spec.window_left >= 0, can.window, f"window_left={spec.window_left}"),
        ("soft_cap", spec.logits_soft_cap is not None, can.soft_cap, f"logits_soft_cap={spec.logits_soft_cap}"),
        ("alibi", spec.alibi_slopes is not None, can.alibi or (can.standard_alibi and spec.has_standard_alibi),
         "alibi_slopes"),
        ("rope", spec.pos_encoding_mode != "NONE", can.rope, f"pos_encoding_mode={spec.pos_encoding_mode}"),
        ("sinks", spec.sinks, can.sinks, "sinks"),
        ("chunks", spec.chunk_size is not None, can.chunks, f"chunk_size={spec.chunk_size}"),
        ("non_causal", spec.attention_type is AttentionType.DECODER and not spec.causal, can.non_causal,
         "causal=False"),
        ("unequal_head_dims", spec.head_dim != spec.head_dim_vo, can.unequal_head_dims,
         f"head_dim={spec.head_dim}, head_dim_vo={spec.head_dim_vo}"),
        ("any_scale", spec.scale <= 0, can.any_scale, f"scale={spec.scale:g}"),
    ]  # fmt: skip
    some = {"any_scale": "scales above 0"}
    if can.standard_alibi:
        some["alibi"] = "slopes of ALiBi's paper (spec.alibi_slopes)"
    return [
        Rejection(
            code, got, some.get(code, "layers without it"), "Choose a backend that honours it: attn-backends list."
        )
        for code, wanted, honoured, got in features
        if wanted and not honoured
    ]


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


HALF = frozenset({torch.float16, torch.bfloat16})
_FP8_SINCE = (8, 9)  # compute capability


def reject_other_half(spec: AttentionSpec, others: str, hint: str = "Leave cache.dtype out.") -> list[Rejection]:
    """A cache of the other dtype of 16 bits than the queries', for kernels that read both in one.

    Args:
        others: what to say behind the dtype that is supported.
    """
    if {spec.dtype, spec.cache_dtype} != HALF:
        return []
    return [Rejection("cache_dtype", dtype_name(spec.cache_dtype), dtype_name(spec.dtype) + others, hint)]


def reject_newer_gpu(device: torch.device | str, newest: int, supported: str, hint: str) -> list[Rejection]:
    """A GPU whose compute capability has a larger first number than `newest`."""
    capability = compute_capability(device)
    if capability is None or capability[0] <= newest:
        return []
    return [Rejection("compute_capability", ".".join(map(str, capability)), supported, hint)]


def why_not_interpreted(found: Sequence[Rejection], spec: AttentionSpec) -> list[Rejection]:
    """What is refused where Triton interprets kernels: bfloat16 of queries for a reason of its own."""
    if spec.dtype is not torch.bfloat16:
        return list(found)
    hint = "Triton's interpreter does not multiply bfloat16: load the model in one of these, or unset TRITON_INTERPRET."
    return [replace(each, hint=hint) if each.code == "dtype" else each for each in found]


def reject_early_fp8(spec: AttentionSpec, device: torch.device | str) -> list[Rejection]:
    """An fp8 cache on a GPU whose instructions do not convert it: Triton would fail to compile at the first step."""
    capability = compute_capability(device)
    if spec.cache_dtype not in FP8_DTYPES or capability is None or capability >= _FP8_SINCE:
        return []
    got, since = (".".join(map(str, pair)) for pair in (capability, _FP8_SINCE))
    asked = f"{spec.cache_dtype} on compute capability {got}"
    return [Rejection("cache_dtype", asked, f"fp8 from {since} on", "Leave cache.dtype out.")]
