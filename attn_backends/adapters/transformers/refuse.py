"""What these adapters do not serve, refused by name before anything is computed."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from attn_backends.interface import Rejection, Unsupported
from attn_backends.layer_kinds import SERVED_KINDS, WINDOW_HINT, WINDOWS, is_window, layer_kind, reaches_attention

PREFIX = "attn_backends:"
SPARSE = ("indices", "block_indices")  # of keys that a layer chose


def decline(code: str, got: str, supported: str, hint: str) -> NoReturn:
    """Raises `Unsupported` with one reason."""
    raise Unsupported("attn_backends in transformers", [Rejection(code, got, supported, hint)])


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> None:
    """A call is inference, on one device.

    Raises:
        Unsupported: it is not.
    """
    wanted = any(tensor.requires_grad for tensor in (query, key, value))
    if dropout or (torch.is_grad_enabled() and wanted):
        decline("training", f"dropout={dropout}, gradients wanted", "inference: no backend has a backward pass",
                "Call the model in eval mode under torch.no_grad(), or train with sdpa.")  # fmt: skip
    if query.device != key.device:
        decline(
            "device", f"queries on {query.device}, keys on {key.device}", "one device", "Load with device_map=None."
        )


def check_layer(module: torch.nn.Module, sliding_window: int | None, given: dict[str, Any], in_batch: bool) -> None:
    """A layer is causal attention over its own keys, and its arguments are known.

    Args:
        given: the keyword arguments of the call that no field of a spec takes.
        in_batch: continuous batching calls, which says `is_causal` of its own.

    Raises:
        Unsupported: it is not.
    """
    causal = None if in_batch else given.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        decline("attention_type", f"{type(module).__name__}, an encoder's or cross attention", "causal self-attention",
                'Give the decoder alone to a backend: attn_implementation={"text_config": "attn_backends:…"}, or load '
                "this model with sdpa.")  # fmt: skip
    for name in ("position_bias", "sinks", *SPARSE):
        if given.get(name) is not None:
            decline(name, f"{type(module).__name__} with {name}", "layers without it", "Load this model with eager.")
    if not in_batch and given.get("cu_seq_lens_q") is not None:
        decline("cu_seq_lens_q", "packed sequences", "a batch with an attention_mask, or generate_batch",
                "Leave out cu_seq_lens_q and its companions.")  # fmt: skip
    check_kind(module, sliding_window)


def check_kind(module: torch.nn.Module, sliding_window: int | None) -> None:
    """A layer's kind, as its config has it, reaches the attention function.

    Raises:
        Unsupported: part of its mask does not.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        decline("layer_idx", f"{type(module).__name__} without layer_idx", "layers that say which they are",
                "Load this model with sdpa.")  # fmt: skip
    if not is_window(sliding_window):
        decline("window_left", f"layer {index} with sliding_window={sliding_window}", WINDOWS, WINDOW_HINT)
    kind = layer_kind(config, index)
    if not reaches_attention(kind, sliding_window is not None):
        decline("layer_type", f"layer {index} is {kind}, window {sliding_window}", ", ".join(sorted(SERVED_KINDS)),
                "The mask of such layers does not reach a backend: load this model with sdpa.")  # fmt: skip


def check_model(config: Any) -> None:
    """A model keeps a key and a value for each token in each of its layers, and nothing else.

    Raises:
        Unsupported: it does not.
    """
    if getattr(config, "is_encoder_decoder", False):
        decline("attention_type", f"{config.model_type}, an encoder and a decoder", "decoders", "Load it with sdpa.")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None) is not None:
        decline("kv_sharing", f"{config.model_type}: layers that share keys and values", "layers with their own",
                "Load this model with sdpa.")  # fmt: skip
    others = sorted(set(getattr(config, "layer_types", None) or ()) - SERVED_KINDS)
    if others:
        decline("layer_type", f"{config.model_type} with {', '.join(others)}", ", ".join(sorted(SERVED_KINDS)),
                "Load this model with sdpa.")  # fmt: skip
