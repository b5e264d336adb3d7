"""One layer's attention, and what impls ask of a call before they run it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic

import torch

from attn_backends.cache.kv_cache import KVCache, write_kv
from attn_backends.cache.views import layer_cache
from attn_backends.interface.refusals import refuse_raw_options
from attn_backends.interface.steps import AttentionStep, PlannedStep, StepT
from attn_backends.spec import AttentionSpec, KVCacheSpec, cached_kv_shapes, new_kv_shapes


class AttentionImpl(ABC, Generic[StepT]):
    """One layer's attention. Holds the layer's constants, nothing of a step; never syncs with the device.

    `forward` is the same for all: it checks a call, writes the new keys and values, and calls `attend`; or, where the
    step repeats calls, starts what a layer that lies alike, which was checked, has started.

    Args:
        spec, cache: the layer and the pool.
        device: where it runs.
        sinks: [num_qo_heads] float, needed exactly if `spec.sinks`.
        k_scale, v_scale: a cached value times its scale is the real one, whatever the cache's dtype. Keys and values of
            this step are real ones: they are divided when they are written.
        options: the backend's own options, validated; None for its defaults.
    """

    step_cls: ClassVar[type[AttentionStep[Any]]] = AttentionStep  # what the backend's state returns
    leaves_padding: ClassVar[bool] = True  # `attend` does not touch padded rows: `forward` zeroes their outputs
    _alike: Hashable = None  # equal for layers whose calls differ in tensors alone, where their steps repeat them
    _own_tensors: tuple[torch.Tensor | None, ...] = ()  # the layer's, which calls read beside what they are given

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
        if not (0 < k_scale < math.inf and 0 < v_scale < math.inf):
            raise ValueError(f"k_scale ({k_scale}) and v_scale ({v_scale}) must be positive, and finite")
        refuse_raw_options(options)
        self.spec = spec
        self.cache = cache
        self.device = torch.device(device)
        self.options = options
        self.sinks = None if sinks is None else sinks.contiguous()
        self.k_scale = k_scale
        self.v_scale = v_scale
        self._page_shapes = [(cache.page_size, *row) for row in cached_kv_shapes(spec)]

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor | None,  # [num_new_kv, num_kv_heads, head_dim]; None: nothing new to write
        value: torch.Tensor | None,  # [num_new_kv, num_kv_heads, head_dim_vo]; both are latent rows in MLA
        kv_cache: KVCache | torch.Tensor | None,  # None in a profile run and for encoder attention
        step: StepT,
        output: torch.Tensor | None = None,  # [num_tokens, num_qo_heads, head_dim_vo], written in place
        *,
        lse: torch.Tensor | None = None,  # [num_tokens, num_qo_heads] f32, natural log, written in place
    ) -> torch.Tensor:
        """Write the new keys and values to their slots, attend, and return `output` (allocated if None).

        A cache may be one tensor of keys and values, in the pool's layout: NHD as [num_pages, 2, page_size,
        num_kv_heads, head_dim], HND as [num_pages, 2, num_kv_heads, page_size, head_dim].

        Padded rows come back as zeros. `lse` is the log of the softmax denominator, sinks included. New keys and values
        of another dtype are made the layer's first.

        Raises:
            TypeError: the step is another backend's, or was not given to the state's `begin_forward`.
            ValueError: the step is of other layers, or the tensors are not of this step and layer.
            RuntimeError: the backend holds one plan a group, and has planned another step of the group since.
            Unsupported: an argument that the backend does not honour.
        """
        if type(kv_cache) is not KVCache and isinstance(kv_cache, torch.Tensor):  # the first is the quicker to ask
            kv_cache = layer_cache(kv_cache, self.spec, self.cache)
        if output is None:
            output = query.new_empty(*query.shape[:1], self.spec.num_qo_heads, self.spec.head_dim_vo)
        given = query, key, value, kv_cache, step, output, lse
        repeats = step._repeats if isinstance(step, self.step_cls) else None
        if repeats is None or step.metadata.num_row_tokens < step.metadata.num_tokens:
            self._forward(*given)
        else:
            tensors = (query, key, value, *(kv_cache or (None, None)), output, lse, *self._own_tensors)
            repeats.run(self._alike, tensors, step._tensors, lambda: self._forward(*given))
        return output

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, kv_cache: KVCache | None,
        step: StepT, output: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """`forward`, of a call that no other layer's stands for."""
        if not isinstance(step, self.step_cls):
            held = f" of {type(step.metadata).__name__}" if isinstance(step, AttentionStep) else ""
            got = "None" if step is None else f"a {type(step).__name__}{held}"
            raise TypeError(
                f"{type(self).__name__} takes a {self.step_cls.__name__}, and got {got}: build the metadata with its "
                "backend's builder, and give it to the state's begin_forward before any layer runs"
            )
        step.check_plan()
        spec, metadata = self.spec, step.metadata
        planned = step.spec if isinstance(step, PlannedStep) else metadata.planned_for
        if planned is not None:
            check_planned_for(planned, spec)
        check_call(spec, metadata.num_tokens, query, output, lse)
        if kv_cache is not None:
            check_cache(kv_cache, self._page_shapes, spec.cache_dtype, query.device)
        check_new_kv(spec, metadata.num_new_kv, key, value)
        key, value = (None if new is None else _as_read(new, spec.dtype) for new in (key, value))
        if kv_cache is not None and key is not None and value is not None:
            if (num_slots := metadata.slot_mapping.shape[0]) < key.shape[0]:  # the others belong to no row
                key, value = key[:num_slots], value[:num_slots]
            self.write(key, value, kv_cache, step)
        live_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
        live = live_tokens if self.leaves_padding else metadata.num_row_tokens
        if live < metadata.num_tokens:
            output[live:].zero_()
            if lse is not None:
                lse[live:].fill_(-math.inf)
        self.attend(query, key, value, kv_cache, step, output, lse)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: StepT,
        output: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_vo], strided
        lse: torch.Tensor | None,  # [num_tokens, num_qo_heads] f32, contiguous
    ) -> None:
        """What a backend is: attend, and write `output` and `lse` in place, all checked.

        New keys and values are in the cache already (see `write`). `key` and `value` are there for steps without one.
        Raises `Unsupported` for an LSE where it gives none.
        """

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: StepT) -> None:
        """Write new keys and values to the slots of the step. A backend that does so elsewhere overrides it."""
        write_kv(key, value, kv_cache, step.metadata.slot_mapping, self.k_scale, self.v_scale)


def check_call(
    spec: AttentionSpec,
    num_tokens: int,
    query: torch.Tensor,
    output: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """A call's tensors are of this step and layer, and lie as every kernel can take them.

    Raises:
        ValueError: the query's shape is not [num_tokens, num_qo_heads, head_dim], or the output's not [num_tokens,
            num_qo_heads, head_dim_vo], or the LSE's not [num_tokens, num_qo_heads]; another dtype; they are not on one
            device; the last dimension of one does not lie together, rows of the output are the same memory, or the LSE
            is not contiguous.
    """
    heads = (num_tokens, spec.num_qo_heads)
    _check_tensor("query", query, (*heads, spec.head_dim), spec.dtype)
    if output is not None:
        _check_tensor("output", output, (*heads, spec.head_dim_vo), spec.dtype, query.device)
        if _repeats(output):
            raise ValueError(
                f"output has strides {output.stride()}; several rows are the same memory: pass a tensor of its own"
            )
    if lse is not None:
        _check_tensor("lse", lse, heads, torch.float32, query.device)
        if not lse.is_contiguous():
            raise ValueError(f"lse has strides {lse.stride()}; it must be contiguous: pass a tensor of its own")


def check_cache(
    kv_cache: KVCache, page_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    """Pages are those of a layer: a kernel that took others would read, and write, beyond their slots.

    Args:
        page_shapes: of the layer's keys, and of its values; MLA has keys alone.

    Raises:
        TypeError: it is no `KVCache`.
        ValueError: they have other slots, heads, dims or another dtype, are elsewhere or not as many, or a head's
            numbers do not lie together, nor all of MLA's, or several slots are the same memory.
    """
    if not isinstance(kv_cache, KVCache):
        raise TypeError(f"kv_cache is a {type(kv_cache).__name__}; it must be a KVCache, KVCache(key, value), or None")
    for name, cached, shape in zip(kv_cache._fields, kv_cache, page_shapes, strict=False):
        if cached.shape[1:] != shape or cached.dtype is not dtype or cached.device != device:
            raise ValueError(
                f"kv_cache.{name} has pages of {tuple(cached.shape[1:])} in {cached.dtype} on {cached.device}; this "
                f"layer has pages of {shape} in {dtype}, and its query is on {device}: pass its own pages, of "
                "allocate_kv_cache or alike"
            )
        if cached.stride(-1) != 1 and shape[-1] > 1:
            raise ValueError(
                f"kv_cache.{name} has strides {cached.stride()}; a slot's head_dim must lie together (a last stride of "
                "1): make the pool with allocate_kv_cache"
            )
        if _repeats(cached):
            raise ValueError(
                f"kv_cache.{name} has strides {cached.stride()}; several of its slots are the same memory, where new "
                "tokens would overwrite each other: make the pool with allocate_kv_cache"
            )
    if len(page_shapes) == 1 and not kv_cache.key.is_contiguous():
        raise ValueError(
            f"kv_cache.key has strides {kv_cache.key.stride()}; latent rows must be contiguous: make the pool with "
            "allocate_kv_cache"
        )
    if len(page_shapes) == 2 and len(kv_cache.key) != len(kv_cache.value):
        raise ValueError(
            f"kv_cache has {len(kv_cache.key)} pages of keys and {len(kv_cache.value)} of values: pass as many of both"
        )


def check_new_kv(spec: AttentionSpec, num_new_kv: int, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
    """What a call brings to the cache is what the step expects: both or none, and a row for each new token at least.

    Raises:
        ValueError: it is not; says what is.
    """
    if key is None and value is None:
        return
    for (name, tensor), row in zip((("key", key), ("value", value)), new_kv_shapes(spec), strict=True):
        if tensor is None or tensor.shape[1:] != row or tensor.shape[0] < num_new_kv:
            got = "not given" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"{name} is {got}; this step brings {num_new_kv} tokens of {row} each: pass both key and value, a row "
                "for every one of them"
            )


def _as_read(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """New keys or values in the layer's dtype, their last dimension in one piece."""
    new = new.to(dtype)
    return new if new.stride(-1) == 1 else new.contiguous()


def _check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """A tensor is as a call needs it. `device`: the query's, for the others."""
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, and the query on {device}: pass both on one device")
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} in {tensor.dtype}; this step and layer need {shape} in {dtype}"
        )
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must lie together (a last stride of 1): pass "
            f"{name}.contiguous()"
        )


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether numbers of a tensor are the same memory, as `expand` makes them."""
    strides = tensor.stride()
    return 0 in strides and any(size > 1 for size, stride in zip(tensor.shape, strides, strict=True) if stride == 0)


def check_planned_for(planned: AttentionSpec, spec: AttentionSpec) -> None:
    """A step was planned for layers like this one.

    Raises:
        ValueError: it was not; says what differs.
    """
    if planned is not spec and planned != spec:
        names = vars(planned) | vars(spec)  # MLA's layers have more
        differs = [name for name in names if getattr(planned, name, None) != getattr(spec, name, None)]
        raise ValueError(
            f"this step was planned for layers that differ from this one in {', '.join(differs)}: give the layer "
            "the step of its own plan group"
        )
