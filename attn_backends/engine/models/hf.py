"""The only file that knows transformers: load a model whose attention calls ours, and learn its layers by one dry run.

Contract (transformers 5.17 to 5.23): a function registered under a name is called once per attention layer with queries
and keys after RoPE, `scaling`, and per-layer keyword arguments (`sliding_window`, `softcap`, `s_aux`); extra keyword
arguments given to the model reach it. Batches are flattened: one row of all requests' tokens, with explicit positions.
"""

from __future__ import annotations

import copy
import logging
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from attn_backends.cache.kv_cache import KVCache
from attn_backends.engine.config import EngineConfig
from attn_backends.engine.models.checkpoint import ModelError, count_tensors, find_model, read_json
from attn_backends.engine.models.context import AttentionContext
from attn_backends.engine.models.fused.cpu import fuse_layers
from attn_backends.engine.models.fused.linears import merge_projections, min_tokens, pack_linears
from attn_backends.engine.models.kv_scales import is_kv_scale
from attn_backends.engine.models.latent_layer import LatentAttention, use_latent_attention
from attn_backends.engine.models.sizes import why_not_sizes
from attn_backends.engine.outputs import Report, silent
from attn_backends.interface import AttentionImpl, AttentionMetadataBuilder
from attn_backends.machine import HAS_TRITON
from attn_backends.spec import AttentionSpec

logger = logging.getLogger(__name__)

ATTENTION_NAME = "attn_backends"  # must not contain "flash", "sdpa" or "/": transformers gives those a meaning
# A damaged file sends the parser anywhere: past the end (struct), into text that is none, to absurd sizes.
GGUF_ERRORS = (OSError, ValueError, LookupError, RuntimeError, ImportError, ArithmeticError, MemoryError, struct.error)
_OF_QUANTISED = re.compile(
    r"(?:weight|input|act|activation)_scale(?:_inv|_2)?$|\.scales$|weight_zero_point$|qzeros$|qweight$|weight_packed$|g_idx$"
)
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_qo_heads, num_tokens, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_context: AttentionContext | None = None,
    **constants: Any,
) -> tuple[torch.Tensor, None]:
    if attention_context is None or attention_mask is not None:
        raise RuntimeError(
            "this model was loaded for attn_backends' engine and has no attention of its own: "
            "run it with attn_backends.LLM, not with model.generate()"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention_context.attend(module, query, key, value, constants)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(frozen=True)
class LayerProbe:
    """What one attention layer showed in the dry run."""

    spec: AttentionSpec
    sinks: torch.Tensor | None  # [num_qo_heads]
    kv_b_proj: torch.Tensor | None = None  # of MLA, see `MLAImpl`

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What the layer's impl is given of the model's weights."""
        named = {"sinks": self.sinks, "kv_b_proj": self.kv_b_proj}
        return {name: weight for name, weight in named.items() if weight is not None}


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


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready for the engine."""

    module: torch.nn.Module
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    layers: dict[int, LayerProbe]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    min_tokens: int = 1  # a step of fewer is slower than one padded to this many
    source: Any = None  # what a compiler reads: `module` as transformers made it, over the same weights
    folder: Path | None = None  # where it was read from

    def prepared(
        self,
        builders: Sequence[AttentionMetadataBuilder[Any]],
        impls: Mapping[int, AttentionImpl[Any]],
        caches: Mapping[int, KVCache],
    ) -> LoadedModel:
        """The model to run, now that its layers' impls and empty caches are known: itself, unless it is compiled."""
        return self

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] i64
        positions: torch.Tensor,  # [num_tokens] i64
        logits_at: torch.Tensor,  # [num_logits] i64
        context: AttentionContext,
    ) -> torch.Tensor:  # [num_logits, vocab]
        return run_module(self.module, token_ids, positions, logits_at, context)


def run_module(
    module: Any, token_ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor, context: AttentionContext
) -> torch.Tensor:
    """`LoadedModel.forward` of a Hugging Face model."""
    logits: torch.Tensor = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_at,
        attention_context=context,
    ).logits[0]
    return logits


def load_model(config: EngineConfig, device: torch.device, report: Report = silent) -> LoadedModel:
    """Load weights (safetensors or GGUF) and tokenizer; refuse a model that would not run right.

    Raises:
        ModelError: nothing to load, damaged weights, or a model whose attention cannot be replaced.
    """
    path = find_model(config.model, convert_gguf, report)
    hf_config = _read_config(path, config)
    report("loading the weights")
    with _quietly():
        with _in_our_words(f"cannot load {path}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=hf_config,
                dtype=model_dtype(config, hf_config, device),
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                ignore_mismatched_sizes=True,  # told below
                output_loading_info=True,
            )
        with _in_our_words(f"cannot read the tokenizer of {path}"):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    model, info = loaded
    _check_loaded(path, info)
    return replace(ready_model(model.to(device), tokenizer, config), folder=path)


def _check_loaded(path: Path, info: Mapping[str, Any]) -> None:
    """Refuse weights that are not the model's, and quantised ones that were read without their scales.

    Raises:
        ModelError: tensors are missing, of other shapes, or scales of weights were left out.
    """
    for name, held, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"the weights in {path} do not fit its config.json: {name} has shape {list(held)} where the config asks "
            f"for {list(wanted)}; fetch both again"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"the weights in {path} lack {len(missing)} tensors, such as {missing[:3]}: fetch them again")
    unread = sorted(name for name in info["unexpected_keys"] if not is_kv_scale(name))
    left = [name for name in unread if _OF_QUANTISED.search(name)]
    if unread and not left:
        logger.warning("%d tensors in %s are not read, such as %s", len(unread), path, unread[0])
    if left:
        raise ModelError(
            f"the weights in {path} are quantised in a way that transformers does not read here: {len(left)} tensors, "
            f"such as {left[0]}, would be ignored. Give the model in 16 or 32 bits, or install what its "
            "quantization_config names"
        )


def ready_model(model: Any, tokenizer: Any, config: EngineConfig) -> LoadedModel:
    """A Hugging Face model in memory, with our attention, made ready for the engine. Its layers may be replaced.

    Raises:
        ModelError: its attention does not come through the attention interface, or hides a mask.
    """
    model.eval().requires_grad_(False)
    use_latent_attention(model)
    layers = probe_layers(model)
    source = _twin(model) if config.compile == "model" else None
    packed = _prepare(model, config)
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    return LoadedModel(
        module=model,
        tokenizer=tokenizer,
        layers=layers,
        max_model_len=model.config.get_text_config().max_position_embeddings,
        vocab_size=model.get_input_embeddings().num_embeddings,
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        min_tokens=min_tokens(model.dtype) if packed else 1,
        source=source,
    )


def _prepare(model: Any, config: EngineConfig) -> int:
    """Make the model fast, after it was checked as it is; returns how many layers and products are oneDNN's now."""
    if config.compile == "model" and model.device.type != "cpu":  # it is never run as it is
        return 0
    base = model.base_model
    fused = 0
    if config.fuse_layers and hasattr(base, "rotary_emb"):
        if model.device.type == "cuda" and HAS_TRITON:
            from attn_backends.engine.models.fused.cuda import fuse_cuda_layers

            fuse_cuda_layers(model)
        else:
            fused = fuse_layers(base.layers, base.rotary_emb)
    if config.merge_projections:
        merge_projections(model)
    return fused + (pack_linears(model) if config.pack_linears else 0)


def _twin(model: Any) -> Any:
    """Another model over the same weights, which keeps its form when this one's layers are replaced."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def layer_specs(config: EngineConfig, device: torch.device) -> dict[int, AttentionSpec]:
    """The attention layers of the config's model, from its config file alone: no weights are read or allocated."""
    hf_config = _read_config(find_model(config.model, convert_gguf), config)
    dtype = model_dtype(config, hf_config, device)
    with _quietly(), torch.device("meta"):
        with _in_our_words(f"{config.model}/config.json describes no model that transformers can make"):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=config.trust_remote_code
            )
        model.set_experts_implementation("batched_mm")  # the others do not run without weights in every dtype
    use_latent_attention(model)
    return {layer: probe.spec for layer, probe in probe_layers(model.eval()).items()}


def convert_gguf(file: Path, target: Path) -> None:
    """Dequantise a GGUF file to float32 safetensors, with config and tokenizer beside it.

    Raises:
        ModelError: the file is damaged, cut short or of a kind that transformers cannot read.
    """
    try:
        with _quietly():
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except GGUF_ERRORS as error:
        raise ModelError(f"cannot read {file}: damaged, cut short or of an unknown kind: {error}") from error
    # save_pretrained refuses a model that still says it is quantised; its tensors no longer are.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def model_dtype(config: EngineConfig, hf_config: Any, device: torch.device) -> torch.dtype:
    """The config's dtype; for `auto` the checkpoint's, but float32 for a float16 checkpoint on a CPU."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    stored = hf_config.get_text_config().dtype or torch.float32
    return torch.float32 if stored is torch.float16 and device.type == "cpu" else stored


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


def _read_config(path: Path, config: EngineConfig) -> Any:
    """The model's config, as our own copy: transformers reads the attention's name from it at call time."""
    _check_raw_config(path, config.trust_remote_code)
    with _quietly(), _in_our_words(f"cannot read the config of {path}"):
        hf_config = copy.deepcopy(AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code))
        wrong = why_not_sizes(hf_config.get_text_config().to_dict())
    if wrong:
        raise ModelError(f"{path}/config.json: {wrong}")
    check_config(hf_config)
    scheme = getattr(hf_config, "quantization_config", None)
    if isinstance(scheme, dict) and scheme.get("kv_cache_scheme") and not scheme.get("config_groups"):
        del hf_config.quantization_config  # of the cache alone, which is ours: the weights are plain
    return hf_config


def _check_raw_config(path: Path, trust_remote_code: bool) -> None:
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
    wrong, num_layers, num_tensors = why_not_sizes(text), text.get("num_hidden_layers"), count_tensors(path)
    if not wrong and isinstance(num_layers, int) and num_layers > num_tensors:
        wrong = f"num_hidden_layers is {num_layers}, and the weights have {num_tensors} tensors, fewer than layers"
    if wrong:
        raise ModelError(f"{path}/config.json: {wrong}")


@contextmanager
def _in_our_words(what: str) -> Iterator[None]:
    """Whatever a library raises over a folder of anyone's becomes a `ModelError`, with the cause chained.

    Raises:
        ModelError: `what`, and the first line of the cause.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a config reaches code of hundreds of models, which raises anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(f"{what}: {type(error).__name__}: {lines[-1] if lines else error}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' own progress bars and notes, which would tear ours."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
