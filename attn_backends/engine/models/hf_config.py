"""A Hugging Face model's config: read, and refused where the model would load, and then not run right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from attn_backends.engine.models.checkpoint import ModelError, count_tensors, in_our_words, read_json
from attn_backends.engine.models.sizes import why_not_sizes


def read_config(path: Path, trust_remote_code: bool, has_weights: bool = True) -> Any:
    """The model's config, as our own copy: transformers reads the attention's name from it at call time."""
    _check_raw_config(path, trust_remote_code, has_weights)
    with quietly(), in_our_words(f"cannot read the config of {path}"):
        hf_config = copy.deepcopy(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
        wrong = why_not_sizes(hf_config.get_text_config().to_dict())
    if wrong:
        raise ModelError(f"{path}/config.json: {wrong}")
    check_config(hf_config)
    scheme = getattr(hf_config, "quantization_config", None)
    if isinstance(scheme, dict) and scheme.get("kv_cache_scheme") and not scheme.get("config_groups"):
        del hf_config.quantization_config  # of the cache alone, which is ours: the weights are plain
    return hf_config


def check_config(hf_config: Any) -> None:
    """Refuse a model that would load, and then not run right.

    Raises:
        ModelError: the model has an encoder, hides a mask from its attention function, or bypasses the interface.
    """
    text = hf_config.get_text_config()
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ModelError(f"{hf_config.model_type} is an encoder-decoder model; the engine runs decoder-only models")
    if getattr(text, "attention_chunk_size", None) and "chunked_attention" in (
        getattr(text, "layer_types", None) or ()
    ):
        raise ModelError(
            f"{hf_config.model_type} applies local attention (chunked_attention layers) through a mask that never "
            "reaches the attention function; it would run with full attention instead"
        )
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if cls is not None and not cls._supports_attention_backend:
        raise ModelError(
            f"{cls.__name__} does not use transformers' attention interface: it would ignore the paged cache. "
            "Use a model that does (llama, qwen, mistral, gemma, phi3, gpt_oss, …)"
        )


def _check_raw_config(path: Path, trust_remote_code: bool, has_weights: bool) -> None:
    """Refuse a config of a kind that transformers does not know, or of impossible sizes, before it makes anything."""
    raw = read_json(path / "config.json")
    kind, own_code = raw.get("model_type"), "auto_map" in raw
    if kind not in list(transformers.CONFIG_MAPPING) and not (own_code and trust_remote_code):
        hint = "give a model of a kind that it knows (llama, qwen3, mistral, gemma3, …), or a newer transformers"
        if own_code:
            hint = (
                "the folder brings Python code of its own (auto_map), which runs only if you write trust_remote_code: "
                "true in the config file, or set ATTN_BACKENDS_TRUST_REMOTE_CODE=true"
            )
        said = f"model_type {kind!r}" if "model_type" in raw else "no model_type"
        raise ModelError(
            f"{path}/config.json says {said}; transformers {transformers.__version__} has no such model: {hint}"
        )
    nested = raw.get("text_config")
    text = nested if isinstance(nested, dict) else raw
    wrong, num_layers = why_not_sizes(text), text.get("num_hidden_layers")
    num_tensors = count_tensors(path) if has_weights else None
    if not wrong and isinstance(num_layers, int) and num_tensors is not None and num_layers > num_tensors:
        wrong = f"num_hidden_layers is {num_layers}, and the weights have {num_tensors} tensors, fewer than layers"
    if wrong:
        raise ModelError(f"{path}/config.json: {wrong}")


@contextmanager
def quietly() -> Iterator[None]:
    """Switches off transformers' own progress bars and notes, which would tear ours."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
