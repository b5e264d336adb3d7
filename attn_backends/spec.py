"""What a layer asks of attention, in plain values: `AttentionSpec`, `MLASpec`, `KVCacheSpec`, `Limits`, plan groups."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar, cast, get_args

import torch

Layout = Literal["NHD", "HND"]
PosEncoding = Literal["NONE", "ROPE_LLAMA"]
LayerT = TypeVar("LayerT", bound=Hashable)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class AttentionType(enum.StrEnum):
    """Who attends to whom, and where keys and values come from."""

    DECODER = "decoder"  # causal self-attention over the paged cache
    ENCODER = "encoder"  # self-attention over this step's tokens alone; no cache
    CROSS = "encoder_decoder"  # decoder tokens over an encoder's cached keys and values


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer, as numbers. Equal specs share a plan (see `plan_groups`).

    `None` given for `head_dim_vo`, `scale` or `cache_dtype` is resolved on construction, so a reader always finds a
    value there. Raises `ValueError` for a combination that has no meaning.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    head_dim_vo: int = cast(int, None)  # of values and outputs; None: head_dim
    scale: float = cast(float, None)  # multiplies q·k before soft cap and softmax; None: head_dim ** -0.5
    window_left: int = -1  # keys visible to the left, self excluded; -1 is unlimited
    logits_soft_cap: float | None = None  # c · tanh(logit / c), after the scale
    alibi_slopes: tuple[float, ...] | None = None  # one a query head: slope · (key position - query position)
    pos_encoding_mode: PosEncoding = "NONE"  # ROPE_LLAMA: queries and keys, cached without it, are rotated here
    rope_scale: float = 1.0  # of ROPE_LLAMA: positions are divided by it
    rope_theta: float = 1e4  # of ROPE_LLAMA: pair i of head_dim / 2 turns by theta ** (-2i / head_dim) a position
    sinks: bool = False  # one learned logit a query head joins the softmax and is dropped (the Impl gets the values)
    causal: bool = True
    attention_type: AttentionType = AttentionType.DECODER
    chunk_size: int | None = None  # local attention: a query sees its own chunk of this many positions only
    dtype: torch.dtype = torch.float32  # of queries and outputs
    cache_dtype: torch.dtype = cast(torch.dtype, None)  # of cached keys and values; None: dtype

    def __post_init__(self) -> None:
        if self.head_dim_vo is None:
            object.__setattr__(self, "head_dim_vo", self.head_dim)
        _check_whole(self, "num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo")
        resolved = {
            "scale": float(self.head_dim**-0.5 if self.scale is None else self.scale),
            "cache_dtype": self.dtype if self.cache_dtype is None else self.cache_dtype,
            "attention_type": AttentionType(self.attention_type),
            "alibi_slopes": None if self.alibi_slopes is None else tuple(float(s) for s in self.alibi_slopes),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads ({self.num_qo_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.window_left < -1:
            raise ValueError(f"window_left is {self.window_left}; use -1 for no window, or 0 and more")
        if self.logits_soft_cap is not None and not 0 < self.logits_soft_cap < math.inf:
            raise ValueError(f"logits_soft_cap is {self.logits_soft_cap}; use None for no cap, or a positive number")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_qo_heads:
            raise ValueError(f"alibi_slopes has {len(self.alibi_slopes)} values for {self.num_qo_heads} query heads")
        if self.chunk_size is not None and (self.chunk_size < 1 or self.window_left >= 0):
            raise ValueError(f"chunk_size is {self.chunk_size}; it must be at least 1 and excludes window_left")
        for name, number in (("scale", self.scale), *(("alibi_slopes", slope) for slope in self.alibi_slopes or ())):
            if not math.isfinite(number):
                raise ValueError(f"{name} is {number}; use None for its default, or a finite number")
        mode, scale, theta = self.pos_encoding_mode, self.rope_scale, self.rope_theta
        if mode not in get_args(PosEncoding):
            raise ValueError(
                f"pos_encoding_mode is {mode!r}; allowed: {', '.join(get_args(PosEncoding))}. For ALiBi leave it out, "
                "and give alibi_slopes"
            )
        if mode == "NONE" and (scale, theta) != (1.0, 1e4):
            raise ValueError(
                f"rope_scale is {scale} and rope_theta {theta} of a layer whose queries and keys are rotated before: "
                "leave both out, or set pos_encoding_mode to ROPE_LLAMA"
            )
        if mode == "ROPE_LLAMA" and (self.head_dim % 2 or self.alibi_slopes is not None):
            raise ValueError("ROPE_LLAMA turns pairs of an even head_dim, and excludes alibi_slopes")
        if not (0 < scale < math.inf and 0 < theta < math.inf):
            raise ValueError(f"rope_scale is {scale} and rope_theta {theta}; both must be positive numbers")
        positional = self.window_left >= 0 or self.chunk_size is not None or self.encodes_positions
        if self.attention_type is AttentionType.CROSS and positional:
            raise ValueError(
                "cross attention has no common positions: leave out window_left, chunk_size, alibi_slopes, "
                "pos_encoding_mode"
            )
        if self.attention_type is not AttentionType.DECODER and self.causal:
            raise ValueError(f"{self.attention_type.value} attention sees every key: pass causal=False")

    @property
    def encodes_positions(self) -> bool:
        """Whether logits depend on where a key is, beyond whether it is seen: ALiBi, or RoPE inside attention."""
        return self.alibi_slopes is not None or self.pos_encoding_mode != "NONE"

    @property
    def has_standard_alibi(self) -> bool:
        """Whether there are ALiBi slopes, and they are `alibi_slopes(num_qo_heads)`, to what float32 holds of them."""
        given, standard = self.alibi_slopes, alibi_slopes(self.num_qo_heads)
        return given is not None and all(
            math.isclose(*pair, rel_tol=1e-6) for pair in zip(given, standard, strict=True)
        )

    @property
    def is_local(self) -> bool:
        """Whether a query may not see keys far before its own: there is a window, or there are chunks."""
        return self.window_left >= 0 or self.chunk_size is not None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class KVCacheSpec:
    """The paged pool that every layer has one cache of: `num_pages` pages of `page_size` slots.

    Backends are asked, and states, builders and impls made, without knowing the number of pages: an engine often has it
    last. Only what allocates or checks a pool needs it.
    """

    num_pages: int | None = None  # None: not known yet
    page_size: int = 16
    layout: Layout = "NHD"

    def __post_init__(self) -> None:
        _check_whole(self)
        if (self.num_pages is not None and self.num_pages < 1) or self.page_size < 1:
            raise ValueError(f"num_pages ({self.num_pages}) and page_size ({self.page_size}) must be at least 1")
        if self.layout not in ("NHD", "HND"):
            raise ValueError(f"layout is {self.layout!r}; allowed: 'NHD', 'HND'")

    @property
    def pages(self) -> int:
        """The number of pages, where it has to be known.

        Raises:
            ValueError: it is not.
        """
        if self.num_pages is None:
            raise ValueError("num_pages is not known, and this needs a pool's size: pass KVCacheSpec(num_pages=...)")
        return self.num_pages

    @property
    def num_slots(self) -> int:
        return self.pages * self.page_size


@dataclass(frozen=True)
class Limits:
    """The most that one step may hold. States are sized from these, once."""

    max_num_requests: int
    max_num_tokens: int  # query tokens a step
    max_model_len: int  # tokens of one request, cached and new

    def __post_init__(self) -> None:
        _check_whole(self, *vars(self))

    def check(self, num_reqs: int, num_tokens: int, num_keys: int) -> None:
        """A batch is within these: its rows, its query tokens, and the keys of its longest row.

        Raises:
            ValueError: it is not.
        """
        if num_reqs > self.max_num_requests or num_tokens > self.max_num_tokens or num_keys > self.max_model_len:
            raise ValueError(
                f"a batch of {num_reqs} rows, {num_tokens} tokens and up to {num_keys} keys a row; the limits are "
                f"max_num_requests {self.max_num_requests}, max_num_tokens {self.max_num_tokens} and max_model_len "
                f"{self.max_model_len}: split it, or make builder and state with higher ones"
            )


@dataclass(frozen=True)
class PlanGroup(Generic[LayerT]):
    """Layers with equal specs: one builder and one plan serve them all."""

    index: int
    spec: AttentionSpec
    layers: tuple[LayerT, ...]


def plan_groups(specs: Mapping[LayerT, AttentionSpec]) -> tuple[PlanGroup[LayerT], ...]:
    """Group a model's layers by equal specs, in order of first appearance.

    Examples:
        >>> full, local = AttentionSpec(8, 2, 64), AttentionSpec(8, 2, 64, window_left=127)
        >>> [g.layers for g in plan_groups({0: local, 1: full, 2: local})]
        [(0, 2), (1,)]
    """
    layers: dict[AttentionSpec, list[LayerT]] = {}
    for layer, spec in specs.items():
        layers.setdefault(spec, []).append(layer)
    return tuple(PlanGroup(i, spec, tuple(names)) for i, (spec, names) in enumerate(layers.items()))


@dataclass(frozen=True)
class MLASpec(AttentionSpec):
    """One layer of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). The defaults are V3's.

    The inherited numbers say what is computed: every head has keys and values of its own. `head_dim` is
    `qk_nope_head_dim + qk_rope_head_dim`, `head_dim_vo` is `v_head_dim`; a model that stretches RoPE gives
    its own scale. The two new ones say what is cached instead: one latent row a token.

    Examples:
        >>> MLASpec(128).latent_dim, MLASpec(128).qk_nope_head_dim
        (576, 128)
    """

    num_kv_heads: int = cast(int, None)  # None: num_qo_heads, and nothing else
    head_dim: int = 192
    head_dim_vo: int = 128
    kv_lora_rank: int = 512  # of the compressed keys and values, after their norm
    qk_rope_head_dim: int = 64  # of the key that all heads share, after RoPE: the last part of `head_dim`

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_qo_heads)
        super().__post_init__()

    def _check(self) -> None:
        super()._check()
        if self.num_kv_heads != self.num_qo_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} for {self.num_qo_heads} query heads: in MLA each has its own "
                "keys and values, expanded from the latent rows; leave num_kv_heads out"
            )
        if self.kv_lora_rank < 1 or not 1 <= self.qk_rope_head_dim < self.head_dim:
            raise ValueError(
                f"kv_lora_rank is {self.kv_lora_rank} and qk_rope_head_dim {self.qk_rope_head_dim} of head_dim "
                f"{self.head_dim}: need kv_lora_rank >= 1 and 1 <= qk_rope_head_dim < head_dim"
            )

    @property
    def qk_nope_head_dim(self) -> int:
        """The first part of `head_dim`, which knows no positions."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached a token: the latent row, then the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of the first `num_heads` heads: a geometric series for a power of two; the heads above it take every
    second slope of the series that is twice as long (Press et al., arXiv 2108.12409, and its reference code)."""
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    further = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(0, 2 * (num_heads - power), 2)]
    return tuple(first + further)


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls a dtype, without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _check_whole(spec: AttentionSpec | KVCacheSpec | Limits, *positive: str) -> None:
    """Make whole numbers Python's. Raise `ValueError` for what is none, and below 1 in the fields of these names."""
    for each in fields(spec):
        name, value = each.name, getattr(spec, each.name)
        if each.type == "int" or (each.type == "int | None" and value is not None):
            try:
                object.__setattr__(spec, name, operator.index(value))
            except TypeError:
                raise ValueError(f"{name} is {value!r}; it must be a whole number") from None
            if name in positive and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


def new_kv_shapes(spec: AttentionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a token brings: the shapes of its rows in `key` and `value`, as `AttentionImpl.forward` takes them."""
    if isinstance(spec, MLASpec):
        return (spec.kv_lora_rank,), (spec.qk_rope_head_dim,)
    return (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim_vo)


def cached_kv_shapes(spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
    """What a slot holds: the shapes of a token's rows in `KVCache.key` and `value`; MLA has the one of latent rows."""
    return ((spec.latent_dim,),) if isinstance(spec, MLASpec) else new_kv_shapes(spec)
