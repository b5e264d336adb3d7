"""Makes a `LoadedModel` from the engine's settings: read, checked by a dry run, accelerated, compiled if asked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch

from attn_backends.engine.config import EngineConfig
from attn_backends.engine.models.accelerate import STAGES, Stage, accelerate, twin
from attn_backends.engine.models.checkpoint import find_model
from attn_backends.engine.models.hf import convert_gguf, model_without_weights, read_model
from attn_backends.engine.models.hf_config import read_config
from attn_backends.engine.models.latent_layer import use_latent_attention
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.engine.models.probe import probe_layers
from attn_backends.engine.outputs import Report, silent
from attn_backends.spec import AttentionSpec


def load_model(
    config: EngineConfig, device: torch.device, report: Report = silent, stages: Collection[Stage] = STAGES
) -> LoadedModel:
    """Load weights (safetensors or GGUF) and tokenizer; refuse a model that would not run right.

    Args:
        stages: see `ready_model`.

    Raises:
        ModelError: nothing to load, damaged weights, a model whose attention cannot be replaced, or one that cannot be
            compiled as `accelerate` asks.
    """
    path = find_model(config.model, convert_gguf, report)
    hf_config = read_config(path, config.trust_remote_code)
    report("loading the weights")
    dtype = model_dtype(config, hf_config, device)
    model, tokenizer = read_model(path, hf_config, dtype, config.trust_remote_code)
    return ready_model(model.to(device), tokenizer, config.accelerate, stages=stages, folder=path, report=report)


def layer_specs(config: EngineConfig, device: torch.device) -> dict[int, AttentionSpec]:
    """The attention layers of the config's model, from its config file alone: no weights are read or allocated.

    The model may be a config.json without weights beside it.
    """
    path, hf_config = _model_config(config)
    dtype = model_dtype(config, hf_config, device)
    model = model_without_weights(path, hf_config, dtype, config.trust_remote_code)
    use_latent_attention(model)
    return {layer: probe.spec for layer, probe in probe_layers(model.eval()).items()}


def model_limit(config: EngineConfig) -> int:
    """Tokens of the longest request that the config's model takes, from its config file alone."""
    limit: int = _model_config(config)[1].get_text_config().max_position_embeddings
    return limit


def _model_config(config: EngineConfig) -> tuple[Path, Any]:
    """The folder of the config's model, and what its config file says."""
    file = Path(config.model).expanduser()
    is_file = file.name == "config.json" and file.is_file()
    path = file.parent if is_file else find_model(config.model, convert_gguf)
    return path, read_config(path, config.trust_remote_code, has_weights=not is_file)


def model_dtype(config: EngineConfig, hf_config: Any, device: torch.device) -> torch.dtype:
    """The config's dtype; for `auto` the checkpoint's, but float32 for a float16 checkpoint on a CPU."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    stored = hf_config.get_text_config().dtype or torch.float32
    return torch.float32 if stored is torch.float16 and device.type == "cpu" else stored


def ready_model(
    model: Any,
    tokenizer: Any,
    how: Literal["off", "on", "compile"] = "on",
    *,
    stages: Collection[Stage] = STAGES,
    folder: Path | None = None,
    report: Report = silent,
) -> LoadedModel:
    """A Hugging Face model in memory, with our attention, made ready for the engine. Its layers may be replaced.

    Args:
        how: `EngineConfig.accelerate`.
        stages: those that run unless `how` is "off", for measuring each by itself.
        folder: where the model was read from.

    Raises:
        ModelError: its attention does not come through the attention interface, or hides a mask; or it cannot be
            compiled.
    """
    model.eval().requires_grad_(False)
    use_latent_attention(model)
    layers = probe_layers(model)
    source = twin(model) if how == "compile" else None
    # What a GPU compiles is never run as it is.
    as_it_is = how == "off" or (how == "compile" and model.device.type != "cpu")
    min_tokens = 1 if as_it_is else accelerate(model, stages)
    loaded = LoadedModel(
        module=model,
        tokenizer=tokenizer,
        layers=layers,
        max_model_len=model.config.get_text_config().max_position_embeddings,
        vocab_size=model.get_input_embeddings().num_embeddings,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        min_tokens=min_tokens,
        source=source,
        folder=folder,
    )
    if how != "compile":
        return loaded
    from attn_backends.engine.models.compiled import compile_model  # loads the compiler: half a second

    return compile_model(loaded, model.device, report)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The generation config's end tokens, else the tokenizer's."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)
