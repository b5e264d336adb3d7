"""A Hugging Face model whose attention calls ours: its config, refused where the model would load and then not run
right, its weights, its form without weights, and GGUF files converted.

Contract (transformers 5.17 to 5.23): a function registered under a name is called once per attention layer with queries
and keys after RoPE, `scaling`, and per-layer keyword arguments (`sliding_window`, `softcap`, `s_aux`); extra keyword
arguments given to the model reach it. Batches are flattened: one row of all requests' tokens, with explicit positions.
"""

from __future__ import annotations

import copy
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from attn_backends.engine.models.checkpoint import ModelError, count_tensors, in_our_words, read_json
from attn_backends.engine.models.context import AttentionContext
from attn_backends.engine.models.kv_scales import is_kv_scale

logger = logging.getLogger(__name__)

ATTENTION_NAME = "attn_backends"  # must not contain "flash", "sdpa" or "/": transformers gives those a meaning
# A damaged file sends the parser anywhere: past the end (struct), into text that is none, to absurd sizes.
GGUF_ERRORS = (OSError, ValueError, LookupError, RuntimeError, ImportError, ArithmeticError, MemoryError, struct.error)
_OF_QUANTISED = re.compile(
    r"(?:weight|input|act|activation)_scale(?:_inv|_2)?$|\.scales$|weight_zero_point$|qzeros$|qweight$|weight_packed$|g_idx$"
)


# The largest of each that is taken for a size and not for an error; published models stay far below.
LIMITS = {
    "num_hidden_layers": 4096, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "head_dim": 1 << 16,
    "hidden_size": 1 << 24, "intermediate_size": 1 << 24, "vocab_size": 1 << 28, "max_position_embeddings": 1 << 31,
}  # fmt: skip


OTHER_MODELS = "Use a model that does (llama, qwen, mistral, gemma, phi3, gpt_oss, …)"


class NoContext(RuntimeError):
    """An attention layer was called without the engine's word of where its keys are."""


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
        raise NoContext(
            "this model was loaded for attn_backends' engine and has no attention of its own: "
            "run it with attn_backends.LLM, not with model.generate()"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention_context.attend(module, (query, key, value), constants)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


def read_model(path: Path, hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder.

    Raises:
        ModelError: weights are damaged, missing or of other shapes, or transformers cannot read them or the tokenizer.
    """
    with quietly():
        with in_our_words(f"cannot load {path}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # refused below
                output_loading_info=True,
            )
        with in_our_words(f"cannot read the tokenizer of {path}"):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    model, info = loaded
    _check_loaded(path, info)
    return model, tokenizer


def model_without_weights(path: Path, hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model of a config on torch's meta device.

    Raises:
        ModelError: transformers cannot make it.
    """
    with quietly(), torch.device("meta"):
        with in_our_words(f"{path}/config.json describes no model that transformers can make"):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=trust_remote_code
            )
        model.set_experts_implementation("batched_mm")  # the others do not run without weights in every dtype
    return model


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


def convert_gguf(file: Path, target: Path) -> None:
    """Dequantise a GGUF file to float32 safetensors, with config and tokenizer beside it.

    Raises:
        ModelError: the file is damaged, cut short or of a kind that transformers cannot read.
    """
    try:
        with quietly():
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except GGUF_ERRORS as error:
        raise ModelError(f"cannot read {file}: damaged, cut short or of an unknown kind: {error}") from error
    # save_pretrained refuses a model that still says it is quantised; its tensors no longer are.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


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
            f"{OTHER_MODELS}"
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


def most_positions(hf_config: Any) -> int:
    """Most tokens of a request whose keys all turn by the same angles.

    LongRoPE (arXiv 2402.13753) has two sets: transformers takes the one for long texts as soon as a forward reaches
    beyond `original_max_position_embeddings`, so that a request's tokens would depend on those beside it, and on how
    its prompt is cut. Shorter ones alone are served.
    """
    limit: int = hf_config.max_position_embeddings
    own = getattr(hf_config, "original_max_position_embeddings", None) or limit
    ropes = getattr(hf_config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of all layers, or by their kinds
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            limit = min(limit, rope.get("original_max_position_embeddings") or own)
    return limit


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


def why_not_sizes(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the sizes of a language model's config, in words; None for possible ones.

    A size that is absent, None or a list (one a layer) is left to the model's own code.

    >>> why_not_sizes({"num_attention_heads": 5, "num_key_value_heads": 2})
    'num_attention_heads is 5 and num_key_value_heads 2: the first must be a multiple of the second'
    """
    given = {name: config[name] for name in LIMITS if config.get(name) is not None}
    sizes = {name: value for name, value in given.items() if not isinstance(value, list)}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LIMITS[name]:
            return f"{name} is {size!r}; allowed: a whole number from 1 to {LIMITS[name]}"
    divisions = [("num_attention_heads", "num_key_value_heads")]
    if config.get("head_dim") is None and not config.get("kv_lora_rank"):
        divisions.append(("hidden_size", "num_attention_heads"))
    for many, few in divisions:
        if many in sizes and few in sizes and sizes[many] % sizes[few]:
            return f"{many} is {sizes[many]} and {few} {sizes[few]}: the first must be a multiple of the second"
    return None
