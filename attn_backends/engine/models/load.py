"""Makes a `LoadedModel` from the engine's settings: read, checked by a dry run, accelerated, compiled if asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from attn_backends.engine.config import EngineConfig
from attn_backends.engine.models.checkpoint import ModelError, NeedsWeights, find_model, in_our_words, model_path
from attn_backends.engine.models.context import NewTokens
from attn_backends.engine.models.end_tokens import check_generation_config, end_tokens
from attn_backends.engine.models.fused.cpu import fuse_layers
from attn_backends.engine.models.fused.linears import merge_projections, min_tokens, pack_linears
from attn_backends.engine.models.fused.llama_form import LayerList
from attn_backends.engine.models.hf import (
    OTHER_MODELS,
    NoContext,
    convert_gguf,
    model_without_weights,
    most_positions,
    read_config,
    read_model,
)
from attn_backends.engine.models.latent_layer import LatentAttention, use_latent_attention
from attn_backends.engine.models.loaded_model import LayerProbe, LoadedModel
from attn_backends.engine.outputs import Report, silent
from attn_backends.layer_kinds import SERVED_KINDS, WINDOW_HINT, WINDOWS, is_window, layer_kind, reaches_attention
from attn_backends.machine import HAS_TRITON
from attn_backends.spec import AttentionSpec
from attn_backends.validation import ConfigError

Stage = Literal["fuse", "merge", "pack"]
STAGES: tuple[Stage, ...] = get_args(Stage)


def check_acceleration(how: str, device: torch.device) -> None:
    """Refuse to compile for a CPU.

    Args:
        how: `EngineConfig.accelerate`.

    Raises:
        ConfigError: that is what is asked for.
    """
    if how == "compile" and device.type == "cpu":
        raise ConfigError(
            f"accelerate is compile and the device {device}; allowed there: off or on, as models are compiled for GPUs "
            "alone: set accelerate: on (--accelerate on)"
        )


def load_model(
    config: EngineConfig, device: torch.device, report: Report = silent, stages: Collection[Stage] = STAGES
) -> LoadedModel:
    """Load weights (safetensors or GGUF) and tokenizer; refuse a model that would not run right.

    Args:
        stages: see `ready_model`.

    Raises:
        ConfigError: see `check_acceleration`.
        ModelError: nothing to load, damaged files, wrong end tokens, a model whose attention cannot be replaced, or one
            that cannot be compiled.
    """
    path = find_model(config.model, convert_gguf, report)
    hf_config = read_config(path, config.trust_remote_code)
    check_generation_config(path)
    report("loading the weights")
    dtype = model_dtype(config, hf_config, device)
    model, tokenizer = read_model(path, hf_config, dtype, config.trust_remote_code)
    return ready_model(model.to(device), tokenizer, config.accelerate, stages=stages, folder=path, report=report)


def layer_specs(config: EngineConfig, device: torch.device, *, read_weights: bool = True) -> dict[int, AttentionSpec]:
    """The attention layers of the config's model, from its config file alone: no weights are read or allocated.

    The model may be a config.json without weights beside it.

    Args:
        read_weights: whether to read them after all for a model whose code looks at numbers as it runs.

    Raises:
        NeedsWeights: the model is such a one, and its weights are not there or not to be read.
    """
    path, hf_config = _model_config(config)
    dtype, trusted = model_dtype(config, hf_config, device), config.trust_remote_code
    try:
        return _specs_of(model_without_weights(path, hf_config, dtype, trusted))
    except NeedsWeights:
        if not read_weights or model_path(config.model).is_file():
            raise
    path, hf_config = _model_config(config)  # anew, as a model may have changed what it was made from
    return _specs_of(read_model(path, hf_config, dtype, trusted)[0].to(device))


def specs_without_weights(config: EngineConfig, device: torch.device) -> dict[int, AttentionSpec] | None:
    """`layer_specs` of a model whose config file is enough to know them; None for others."""
    try:
        return layer_specs(config, device, read_weights=False)
    except NeedsWeights:
        return None


def _specs_of(model: Any) -> dict[int, AttentionSpec]:
    use_latent_attention(model)
    return {layer: probe.spec for layer, probe in probe_layers(model.eval()).items()}


def model_limit(config: EngineConfig) -> int:
    """Tokens of the longest request that the config's model takes, from its config file alone."""
    return most_positions(_model_config(config)[1].get_text_config())


def _model_config(config: EngineConfig) -> tuple[Path, Any]:
    """The folder of the config's model, and what its config file says."""
    file = model_path(config.model)
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
        stages: those that run if `how` is "on", for measuring each by itself.
        folder: where the model was read from.

    Raises:
        ConfigError: see `check_acceleration`.
        ModelError: its attention does not come through the attention interface, or hides a mask; its end tokens are
            none of its vocabulary; or it cannot be compiled.
    """
    check_acceleration(how, model.device)
    model.eval().requires_grad_(False)
    use_latent_attention(model)
    layers = probe_layers(model)
    vocab_size = model.get_input_embeddings().num_embeddings
    eos_token_ids = end_tokens(model, tokenizer, vocab_size, folder)
    min_tokens = accelerate(model, stages) if how == "on" else 1
    loaded = LoadedModel(
        module=model,
        tokenizer=tokenizer,
        layers=layers,
        max_model_len=most_positions(model.config.get_text_config()),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        min_tokens=min_tokens,
        folder=folder,
    )
    if how != "compile":
        return loaded
    from attn_backends.engine.models.compiled import compile_model  # loads the compiler: half a second

    return compile_model(loaded, model.device, report)


def accelerate(model: Any, stages: Collection[Stage] = STAGES) -> int:
    """Replace layers of a model that was checked as it is; returns to how many tokens shorter steps are padded.

    Args:
        stages: those to run, for measuring each by itself.
    """
    num_packed = _fuse(model) if "fuse" in stages else 0
    if "merge" in stages:
        merge_projections(model)
    if "pack" in stages:
        num_packed += pack_linears(model)
    return min_tokens(model.dtype) if num_packed else 1


def _fuse(model: Any) -> int:
    """Returns how many layers have products for a CPU now: of a library, or in C."""
    base = model.base_model
    if not hasattr(base, "rotary_emb"):
        return 0
    if model.device.type == "cuda" and HAS_TRITON:
        from attn_backends.engine.models.fused.cuda import fuse_cuda_layers

        fuse_cuda_layers(model)
        return 0
    num_fused = fuse_layers(base.layers, base.rotary_emb)
    if num_fused:
        base.layers = LayerList(base.layers)
    return num_fused


class _Probe:
    """An attention context that records what each layer asks for, and answers with zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerProbe] = {}

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        query, key, value = new
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
        if not is_window(window):
            raise ModelError(f"layer {layer} with sliding_window={window}; served: {WINDOWS}. {WINDOW_HINT}")
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
        NeedsWeights: the model is on torch's meta device, where there are no numbers, and does not run there.
        ModelError: a layer does not come through the attention interface, or hides part of its mask from it.
    """
    probe = _Probe()
    hf_config = model.config.get_text_config()
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    name = type(model).__name__
    if model.device.type == "meta":
        words = in_our_words(f"{name} does not run from its config.json alone: give the folder with its weights",
                             NeedsWeights)  # fmt: skip
    else:
        words = in_our_words(f"{name} does not run as the engine runs it. {OTHER_MODELS}")
    with torch.inference_mode(), words:
        try:
            model(input_ids=tokens, position_ids=torch.arange(2, device=model.device)[None], use_cache=False,
                  attention_context=probe)  # fmt: skip
        except NoContext as error:
            raise ModelError(
                f"{name} does not hand keyword arguments on to its attention, which would know nothing of the cache. "
                f"{OTHER_MODELS}"
            ) from error
    if sorted(probe.layers) != list(range(hf_config.num_hidden_layers)):
        raise ModelError(
            f"{name} has {hf_config.num_hidden_layers} layers, but only {sorted(probe.layers)} came through the "
            "attention interface: the others would keep their own attention and ignore the cache"
        )
    layers = dict(sorted(probe.layers.items()))
    for layer, probed in layers.items():
        kind = layer_kind(hf_config, layer)
        if not probed.spec.causal:
            raise ModelError(
                f"layer {layer} of {name} lets tokens see those behind them, as an encoder's: the engine generates by "
                "causal layers. Where the config has is_decoder, set it to true"
            )
        if not reaches_attention(kind, probed.spec.window_left >= 0):
            raise ModelError(
                f"layer {layer} of {name} is {kind!r}, whose mask does not reach the attention function; "
                f"served: {sorted(SERVED_KINDS)}"
            )
    return layers
