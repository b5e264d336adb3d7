"""What vLLM asks and why it is refused, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import MLASpec
from attn_backends.adapters.vllm.reasons import cache_dtype_of, options_from, reasons_against, spec_of

ASKED: dict[str, Any] = {
    "head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False,
    "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": None, "attn_type": "decoder", "has_sliding_window": False, "use_non_causal": False,
    "use_batch_invariant": False, "use_kv_connector": False, "use_pcp": False, "use_adaptive_verification": False,
    "use_dcp": False, "use_rswa": False,
}  # fmt: skip


def reasons(name: str = "TORCH", **asked: Any) -> list[str]:
    return reasons_against(name, ASKED | asked, "cpu")


def test_what_a_backend_serves_has_no_reasons() -> None:
    assert reasons() == []
    assert reasons(has_sliding_window=True, has_sink=True, block_size=48) == []


@pytest.mark.parametrize("asked", [name for name, value in ASKED.items() if name.startswith("use_") and value is False])
def test_what_none_serves_is_named(asked: str) -> None:
    found = reasons(**{asked: True})
    if asked == "use_kv_connector":
        assert found == []
    else:
        assert any(reason.startswith(asked.removeprefix("use_") if asked == "use_mla" else asked) for reason in found)


def test_a_question_that_nobody_knows_is_refused_if_it_asks_for_something() -> None:
    assert reasons(use_what_comes_next=False) == []
    assert [reason.split(":")[0] for reason in reasons(use_what_comes_next=True)] == ["use_what_comes_next"]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "kv_cache_dtype"),
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"dtype": torch.float64, "device_capability": (9, 0)}, None),
    ],
)
def test_reasons_are_ours(asked: dict[str, Any], code: str | None) -> None:
    assert [reason.split(":")[0] for reason in reasons(**asked)] == [code] * (code is not None)


def test_a_backend_that_is_not_installed_says_what_to_type() -> None:
    (reason,) = reasons("FLASHINFER")
    assert "device" in reason or "pip install" in reason


def test_cache_dtypes() -> None:
    assert cache_dtype_of("auto", torch.bfloat16) is torch.bfloat16
    assert cache_dtype_of(None, torch.float16) is torch.float16
    assert cache_dtype_of("fp8", torch.bfloat16) is torch.float8_e4m3fn
    assert cache_dtype_of("fp8_e5m2", torch.bfloat16) is torch.float8_e5m2


def test_the_models_numbers_are_asked_about() -> None:
    text = SimpleNamespace(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20)
    model = SimpleNamespace(
        hf_text_config=text, get_num_attention_heads=lambda _: 6, get_num_kv_heads=lambda _: 2
    )  # fmt: skip
    plain = spec_of(ASKED, model, None)
    assert (plain.num_qo_heads, plain.num_kv_heads, plain.window_left) == (6, 2, -1)
    latent = spec_of(ASKED | {"use_mla": True}, model, None)
    assert isinstance(latent, MLASpec)
    assert (latent.latent_dim, latent.head_dim, latent.head_dim_vo) == (48, 40, 20)


def test_heads_that_are_no_multiple_are_asked_about_as_equals() -> None:
    """Layers of some models have other heads than its config says."""
    model = SimpleNamespace(get_num_attention_heads=lambda _: 6, get_num_kv_heads=lambda _: 4)
    plain = spec_of(ASKED, model, None)
    assert (plain.num_qo_heads, plain.num_kv_heads) == (4, 4)


@pytest.mark.parametrize(("block_size", "asked"), [(48, 48), (None, 32)])
def test_the_pages_are_vllms_where_it_has_chosen(
    block_size: int | None, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[int | None] = []

    def explain_for(name: str, spec: Any, cache: Any, *more: Any) -> list[str]:
        pages.append(cache.page_size)
        return []

    monkeypatch.setattr("attn_backends.adapters.vllm.reasons.explain_for", explain_for)
    assert reasons_against("TORCH", ASKED | {"block_size": block_size}, "cpu", page_size=32) == []
    assert pages == [asked]


def test_options_come_from_additional_config() -> None:
    assert options_from(None) == {}
    config = SimpleNamespace(additional_config={"attn_backends": {"options": {"a": 1}}, "others": 2})
    assert options_from(config) == {"a": 1}
    config.additional_config = {"attn_backends": {"option": {}}}
    with pytest.raises(ValueError, match="'option'; known: options"):
        options_from(config)
