"""SGLang's layers in our words, and what of them is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from attn_backends.adapters.req_to_token.layers import LayerKind
from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.spec import AttentionSpec

SINKS = ("sinks", "attention_sink_bias")  # what models call them, on the module that holds the attention


def specs_of_model(
    name: str, model: torch.nn.Module, dtype: torch.dtype, cache_dtype: torch.dtype
) -> dict[int, AttentionSpec]:
    """What each attention layer of a model asks, by its `layer_id`.

    Raises:
        Unsupported: a layer asks for what this adapter does not serve, or there is none.
    """
    specs: dict[int, AttentionSpec] = {}
    for layer, sinks in attention_layers(model):
        if reasons := list(reject_layer(layer)):
            raise Unsupported(name, reasons)
        spec = replace(LayerKind.of(layer).spec(dtype, cache_dtype), sinks=sinks)
        if specs.setdefault(layer.layer_id, spec) != spec:
            why = f"two layers of layer_id {layer.layer_id} that differ"
            raise Unsupported(name, [_reason("layer_id", why, "one layer a layer_id")])
    if not specs:
        raise Unsupported(name, [_reason("layers", "a model without attention layers", "models with RadixAttention")])
    return specs


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[Any, bool]]:
    """Each attention layer, and whether its model gives it sinks."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, RadixAttention):
                yield child, any(getattr(module, name, None) is not None for name in SINKS)


def reject_layer(layer: Any) -> Iterator[Rejection]:
    """Why a layer cannot be served, whatever the backend."""
    where = f"layer {layer.layer_id}"
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder":
        yield _reason("attn_type", f"{kind} in {where}", "decoder")
    if layer.is_cross_attention:
        yield _reason("is_cross_attention", f"cross attention in {where}", "self-attention")
    if layer.logit_cap and layer.logit_cap > 0 and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        yield _reason("logit_capping_method", f"{layer.logit_capping_method} in {where}", "tanh")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        yield _reason("xai_temperature_len", f"{layer.xai_temperature_len} in {where}", "none")
    if getattr(layer, "use_irope", False):
        yield _reason("use_irope", f"chunked local attention in {where}", "full attention and sliding windows")
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        yield _reason("pos_encoding_mode", f"{layer.pos_encoding_mode} in {where}", "NONE")


def _reason(code: str, got: str, served: str) -> Rejection:
    return Rejection(code, got, served, "Serve this model with a backend of SGLang's own: --attention-backend triton.")


def reject_runner(runner: Any) -> Iterator[Rejection]:
    """Why a runner cannot be served, whatever its model's layers."""
    if runner.use_mla_backend:
        yield _reason("mla", "a model with latent attention", "models with keys and values of their own")
    for option in ("dcp_size", "attn_cp_size"):
        size = getattr(runner.server_args, option, 1) or 1
        if size > 1:
            yield _reason(option, str(size), "1")
    pool = type(runner.token_to_kv_pool)
    if pool.__module__.rpartition(".")[2].startswith("unified"):
        yield _reason("token_to_kv_pool", pool.__name__, "pools whose slots are those of req_to_token, and SWA pools")
