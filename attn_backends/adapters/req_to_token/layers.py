"""What is read of a layer in the convention of `req_to_token`, and the `AttentionSpec` that it comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from attn_backends.spec import AttentionSpec, AttentionType


class AttentionLayer(Protocol):
    """A layer as engines of this convention hold it; their own objects will do. Heads are those of this device."""

    @property
    def layer_id(self) -> int: ...
    @property
    def tp_q_head_num(self) -> int: ...
    @property
    def tp_k_head_num(self) -> int: ...
    @property
    def qk_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def scaling(self) -> float: ...
    @property
    def sliding_window_size(self) -> int | None: ...  # keys to the left, self excluded (our window_left); -1, None: all
    @property
    def logit_cap(self) -> float: ...  # 0 for none
    @property
    def is_cross_attention(self) -> bool: ...


@dataclass(frozen=True)
class Layer:
    """An `AttentionLayer`, for an engine that has none of its own."""

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window_size: int | None = -1
    logit_cap: float = 0.0
    is_cross_attention: bool = False


class LayerKind(NamedTuple):
    """All that attention asks of a layer. Layers of one kind share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    window_left: int
    logit_cap: float
    is_cross_attention: bool

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        """Read a layer.

        Raises:
            ValueError: it says of itself (`attn_type`) that it is no decoder layer.
        """
        attn_type = getattr(layer, "attn_type", None)
        if attn_type is not None and getattr(attn_type, "value", attn_type) != AttentionType.DECODER.value:
            raise ValueError(
                f"layer {layer.layer_id} has attn_type {attn_type}; a table of cached tokens serves decoder layers: "
                "run it without the adapter, with AttentionSpec(attention_type=AttentionType.ENCODER)"
            )
        window = layer.sliding_window_size
        return LayerKind(
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            layer.v_head_dim,
            layer.scaling,
            -1 if window is None else window,
            layer.logit_cap,
            layer.is_cross_attention,
        )

    def spec(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionSpec:
        """The layer in our words. A scale that differs from the usual one in its last bits alone is the usual one."""
        usual = self.head_dim**-0.5
        return AttentionSpec(
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_vo=self.v_head_dim,
            scale=usual if math.isclose(self.scaling, usual, rel_tol=1e-12) else self.scaling,
            window_left=self.window_left,
            logits_soft_cap=self.logit_cap if self.logit_cap > 0 else None,
            causal=not self.is_cross_attention,
            attention_type=AttentionType.CROSS if self.is_cross_attention else AttentionType.DECODER,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )


class LayerKinds:
    """The kinds of layers that will call, each with its plan group.

    Args:
        heads: query heads, KV heads and head_dim of every layer.
        dtype, cache_dtype: of queries and outputs, and of what the pool stores.
        layers: all that will call; None: of the usual scale, without a soft cap, with `window` if it is given and
            without one.
        window: the `sliding_window_size`; one of the layers must have it.

    Attributes:
        specs: one a plan group, in order: windowed ones first, cross attention last.

    Raises:
        ValueError: layers of other heads, none at all, or none of that window.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        layers: Iterable[AttentionLayer] | None,
        window: int | None,
    ) -> None:
        self.heads, self.dtype, self.cache_dtype = heads, dtype, cache_dtype
        kinds = list(map(LayerKind.of, usual_layers(heads, window) if layers is None else layers))
        windows = sorted({kind.window_left for kind in kinds})
        if not kinds or (window is not None and window not in windows):
            raise ValueError(
                f"layers have windows {windows}, and sliding_window_size is {window}: declare every layer in `layers`, "
                "or leave sliding_window_size out"
            )
        kinds.sort(key=lambda kind: (kind.is_cross_attention, kind.window_left < 0))
        self.specs = list(dict.fromkeys(map(self.spec, kinds)))
        self._groups = {kind: self.specs.index(self.spec(kind)) for kind in kinds}

    def spec(self, kind: LayerKind) -> AttentionSpec:
        """A kind in our words.

        Raises:
            ValueError: its heads are others.
        """
        if kind[:3] != self.heads:
            raise ValueError(
                f"a layer has {kind.num_heads} query heads, {kind.num_kv_heads} KV heads and head_dim {kind.head_dim}; "
                f"this adapter was made for {self.heads}: make it with the layer's, as they are on this device"
            )
        return kind.spec(self.dtype, self.cache_dtype)

    def group(self, layer: AttentionLayer) -> int:
        """Index of a layer's plan group, by all that it asks for.

        Raises:
            ValueError: no such layer was declared, so nothing is planned for it.
        """
        kind = LayerKind.of(layer)
        if kind not in self._groups:
            spec = self.spec(kind)
            if spec not in self.specs:
                planned = "; ".join(map(_told, self.specs))
                raise ValueError(
                    f"layer {layer.layer_id} was not declared: it asks for {_told(spec)}, and plans are made for "
                    f"{planned}. Pass every layer in `layers`"
                )
            self._groups[kind] = self.specs.index(spec)
        return self._groups[kind]


def usual_layers(heads: tuple[int, int, int], window: int | None) -> list[AttentionLayer]:
    """Layers of the usual scale without a soft cap: with `window`, if it is given, and without one.

    Args:
        heads: query heads, KV heads and head_dim.
    """
    windows = [-1] if window is None else [window, -1]
    return [Layer(-1, *heads, heads[2], heads[2] ** -0.5, each) for each in windows]


def _told(spec: AttentionSpec) -> str:
    return (
        f"{spec.attention_type.value} attention of scale {spec.scale:g}, window {spec.window_left}, soft cap "
        f"{spec.logits_soft_cap}, value head_dim {spec.head_dim_vo}"
    )
