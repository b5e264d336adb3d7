"""The shipped models' attention layers: each a layer that can be, alike to what transformers knows of them."""

from __future__ import annotations

import pytest
import torch

from attn_backends.spec import MLASpec
from attn_backends.testing.cases.models import PublishedModel, alibi_slopes, published_models

BY_NAME = {model.name: model for model in published_models()}


@pytest.mark.parametrize("model", published_models(), ids=lambda model: model.name)
def test_layers(model: PublishedModel) -> None:
    specs = model.specs(torch.bfloat16, torch.float8_e4m3fn)
    assert len(specs) == len(set(specs)) == (1 if model.every_layer_is_local else 2)
    for spec in specs:
        assert isinstance(spec, MLASpec) == model.is_mla
        assert (spec.num_qo_heads, spec.head_dim) == (model.num_qo_heads, model.head_dim)
        assert (spec.dtype, spec.cache_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert (specs[0].window_left >= 0) == (model.window_left is not None)
    assert (specs[0].chunk_size is not None) == (model.chunk_size is not None)


def test_there_are_enough_of_every_kind() -> None:
    """Names are unique; the groups, dims and features that models have are all here."""
    models = published_models()
    assert len(BY_NAME) == len(models) >= 40
    assert {64, 80, 96, 112, 128, 160, 192, 256} <= {model.head_dim for model in models}
    plain = [model for model in models if not model.is_mla]
    assert {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48, 71} <= {model.num_qo_heads // model.num_kv_heads for model in plain}
    for feature in ("window_left", "chunk_size", "logits_soft_cap", "sinks", "alibi", "kv_lora_rank"):
        assert any(getattr(model, feature) for model in models), feature
    assert any(model.head_dim - (model.qk_rope_head_dim or 0) != model.head_dim_vo for model in models if model.is_mla)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Llama-2-7B", "llama"), ("Mistral-7B-v0.1", "mistral"), ("Gemma-7B", "gemma"), ("Gemma-2-2B", "gemma2"),
        ("gpt-oss-120b", "gpt_oss"), ("GLM-4-9B", "glm"), ("StarCoder2-3B", "starcoder2"),
        ("Qwen3-Next-80B-A3B", "qwen3_next"), ("SmolLM3-3B", "smollm3"), ("Command-R", "cohere"),
        ("DeepSeek-V3", "deepseek_v3"), ("GLM-4.7-Flash", "glm4_moe_lite"), ("MiniCPM3-4B", "minicpm3"),
        ("LongCat-Flash", "longcat_flash"),
    ],
)  # fmt: skip
def test_transformers_agrees(name: str, model_type: str) -> None:
    """Where transformers' default configuration is the published model's."""
    transformers = pytest.importorskip("transformers")
    config, model = transformers.CONFIG_MAPPING[model_type](), BY_NAME[name]
    assert (config.num_attention_heads, config.num_hidden_layers) == (model.num_qo_heads, model.num_layers)
    if model.is_mla:
        mla = (config.kv_lora_rank, config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim)
        assert mla == (model.kv_lora_rank, model.head_dim, model.qk_rope_head_dim)
        assert config.v_head_dim == model.head_dim_vo
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (config.num_key_value_heads, head_dim) == (model.num_kv_heads, model.head_dim)
    window = None if model.window_left is None else model.window_left + 1  # theirs counts the query itself
    assert getattr(config, "sliding_window", None) in (window, None)


def test_alibi_slopes() -> None:
    """The series of the paper at 8 heads; at 12 the four further heads take every second of 16's."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(12) == alibi_slopes(8) + alibi_slopes(16)[:8:2]
