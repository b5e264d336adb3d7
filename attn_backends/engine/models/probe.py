"""The dry run: two tokens through a model show what every attention layer asks for, or that it cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.latent_layer import LatentAttention
from attn_backends.engine.models.loaded_model import LayerProbe
from attn_backends.spec import AttentionSpec

SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


class _Probe:
    """An attention context that records what each layer asks for, and answers with zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerProbe] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise ModelError(
                f"attention layer {layer!r} ran twice in one pass or has no index: layers that share keys and values "
                "are not supported"
            )
        if constants.get("position_bias") is not None:
            raise ModelError("the model adds a learned position bias to its attention, which no backend takes")
        if isinstance(module, LatentAttention):
            self.layers[layer] = LayerProbe(module.spec(query.dtype), None, module.kv_b_proj)
            return query.new_zeros(*query.shape[:2], module.head_dim_vo)
        window, sinks = constants.get("sliding_window"), constants.get("s_aux")
        spec = AttentionSpec(
            num_qo_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            head_dim_vo=value.shape[2],
            scale=constants["scaling"],
            window_left=-1 if window is None else window - 1,  # Hugging Face counts the query's own key
            logits_soft_cap=constants.get("softcap"),
            sinks=sinks is not None,
            causal=getattr(module, "is_causal", True),
            dtype=query.dtype,
        )
        self.layers[layer] = LayerProbe(spec, sinks)
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def probe_layers(model: Any) -> dict[int, LayerProbe]:
    """Run two tokens through the model and record what every attention layer asks for.

    Raises:
        ModelError: a layer does not come through the attention interface, or hides part of its mask from it.
    """
    probe = _Probe()
    hf_config = model.config.get_text_config()
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=torch.arange(2, device=model.device)[None], use_cache=False,
              attention_context=probe)  # fmt: skip
    name = type(model).__name__
    if sorted(probe.layers) != list(range(hf_config.num_hidden_layers)):
        raise ModelError(
            f"{name} has {hf_config.num_hidden_layers} layers, but only {sorted(probe.layers)} came through the "
            "attention interface: the others would keep their own attention and ignore the cache"
        )
    kinds = getattr(hf_config, "layer_types", None) or ["attention"] * len(probe.layers)
    for layer, kind in enumerate(kinds):
        windowed = probe.layers[layer].spec.window_left >= 0
        if kind not in SERVED_LAYER_TYPES or (kind == "sliding_attention" and not windowed):
            raise ModelError(
                f"layer {layer} of {name} is {kind!r}, whose mask does not reach the attention function; "
                f"served: {sorted(SERVED_LAYER_TYPES)}"
            )
    return dict(sorted(probe.layers.items()))
