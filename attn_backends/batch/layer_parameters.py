"""What a plan bakes in of each layer, for backends that make one plan and need it equal in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from attn_backends.spec import AttentionSpec, AttentionType, LayerT, PosEncoding

_MOST_NAMED = 8  # layers that an error names for each value


@dataclass(frozen=True)
class PerLayerParameters:
    """What changes a layer's result beyond its shapes and dtypes; as in `AttentionSpec`."""

    window_left: int
    logits_soft_cap: float | None
    scale: float
    has_sinks: bool
    alibi_slopes: tuple[float, ...] | None
    pos_encoding_mode: PosEncoding
    rope_scale: float
    rope_theta: float
    chunk_size: int | None
    causal: bool
    attention_type: AttentionType


def get_per_layer_parameters(specs: Mapping[LayerT, AttentionSpec]) -> dict[LayerT, PerLayerParameters]:
    """Each layer's parameters, in the order of the layers."""
    shared = [field.name for field in fields(PerLayerParameters) if field.name != "has_sinks"]
    return {
        layer: PerLayerParameters(has_sinks=spec.sinks, **{name: getattr(spec, name) for name in shared})
        for layer, spec in specs.items()
    }


def infer_global_hyperparameters(params: Mapping[LayerT, PerLayerParameters]) -> PerLayerParameters:
    """The one set of parameters that all layers share, for a backend that plans once for a whole model.

    Raises:
        ValueError: layers differ, with each value and the layers that have it; or there are no layers.
    """
    if not params:
        raise ValueError("no layers: there are no parameters to infer")
    if len(set(params.values())) > 1:
        raise ValueError(
            f"a single plan for all layers needs equal parameters, and these differ: {_differences(params)}. Plan "
            "groups lift this rule: plan_groups(specs) gives the layers of each set a builder and a plan of their own"
        )
    return next(iter(params.values()))


def _differences(params: Mapping[LayerT, PerLayerParameters]) -> str:
    """ "window_left is 127 in layers 0, 2; -1 in layer 1", and so on for each parameter that differs."""
    found_different = []
    for field in fields(PerLayerParameters):
        layers: dict[object, list[str]] = {}
        for layer, found in params.items():
            layers.setdefault(getattr(found, field.name), []).append(str(layer))
        if len(layers) > 1:
            values = "; ".join(f"{value} in {_named(names)}" for value, names in layers.items())
            found_different.append(f"{field.name} is {values}")
    return ", and ".join(found_different)


def _named(layers: list[str]) -> str:
    more = len(layers) - _MOST_NAMED
    shown = ", ".join(layers[:_MOST_NAMED])
    return f"layer{'s' * (len(layers) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
