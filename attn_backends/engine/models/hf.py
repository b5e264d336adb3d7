"""A Hugging Face model whose attention calls ours: its weights, its form without weights, and GGUF files converted.

Contract (transformers 5.17 to 5.23): a function registered under a name is called once per attention layer with queries
and keys after RoPE, `scaling`, and per-layer keyword arguments (`sliding_window`, `softcap`, `s_aux`); extra keyword
arguments given to the model reach it. Batches are flattened: one row of all requests' tokens, with explicit positions.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from attn_backends.engine.models.checkpoint import ModelError, in_our_words
from attn_backends.engine.models.context import AttentionContext
from attn_backends.engine.models.hf_config import quietly
from attn_backends.engine.models.kv_scales import is_kv_scale

logger = logging.getLogger(__name__)

ATTENTION_NAME = "attn_backends"  # must not contain "flash", "sdpa" or "/": transformers gives those a meaning
# A damaged file sends the parser anywhere: past the end (struct), into text that is none, to absurd sizes.
GGUF_ERRORS = (OSError, ValueError, LookupError, RuntimeError, ImportError, ArithmeticError, MemoryError, struct.error)
_OF_QUANTISED = re.compile(
    r"(?:weight|input|act|activation)_scale(?:_inv|_2)?$|\.scales$|weight_zero_point$|qzeros$|qweight$|weight_packed$|g_idx$"
)


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
