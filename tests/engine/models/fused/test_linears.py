"""Merged, packed and fused layers give what the originals give, and take the place of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from attn_backends.engine.models.fused import cpu as fused_layer, linears
from attn_backends.engine.models.fused.cpu import FusedLayer, fuse_layers
from attn_backends.engine.models.fused.linears import (
    MergedSlice,
    MklLinear,
    PackedLinear,
    is_right,
    merge_projections,
    pack_linears,
    packable,
    padded_size,
)
from attn_backends.engine.models.fused.llama_form import has_llama_form
from attn_backends.engine.models.fused.native import NativeLayer, NativeLinear, operators
from attn_backends.engine.models.hf import ATTENTION_NAME
from tests.helpers.tiny_models import COMMON, tiny_model

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
needs_packing = pytest.mark.skipif(not packable(torch.ones(2, 2)), reason="this CPU's torch has no oneDNN")


class Mix:
    """An attention context for tests: any function of the three will do."""

    def attend(self, module: Any, new: tuple[torch.Tensor, ...], constants: object) -> torch.Tensor:
        query, key, value = new
        groups = query.shape[1] // key.shape[1]
        return query * module.layer_idx + (key - value).repeat_interleave(groups, 1)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 14)[None]
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=ids, position_ids=ids, use_cache=False, attention_context=Mix()).logits
    return out


def ours(family: str, **changes: Any) -> Any:
    model = tiny_model(family, **changes).requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_merged_projections(bias: bool) -> None:
    model = ours("llama", attention_bias=bias)
    expected = logits(model)
    assert merge_projections(model) == 8  # qkv and gate-up of four layers
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert isinstance(model.model.layers[0].self_attn.k_proj, MergedSlice)


def test_layers_without_siblings_are_left_alone() -> None:
    assert merge_projections(ours("phi3")) == 0  # qkv_proj and gate_up_proj already


@needs_packing
@pytest.mark.parametrize("merge", [False, True])
def test_packed_linears(merge: bool) -> None:
    model = ours("llama")
    expected = logits(model)
    if merge:
        merge_projections(model)
    assert pack_linears(model) == (4 * 4 + 1 if merge else 4 * 7 + 1)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


class Router(torch.nn.Module):
    """It reads its layer's weight, as HunYuan's does."""

    def __init__(self) -> None:
        super().__init__()
        self.wg, self.other = torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 32)
        self.gate_proj, self.up_proj = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.wg(tokens.to(self.wg.weight.dtype)).to(self.up_proj.weight.dtype)
        return self.other(self.gate_proj(hidden) * self.up_proj(hidden))


@needs_packing
def test_layers_whose_weights_are_read_are_left_alone() -> None:
    router, tokens = Router().requires_grad_(False), torch.randn(3, 64)
    expected = router(tokens)
    assert merge_projections(router) == 0
    assert pack_linears(router) == 2
    torch.testing.assert_close(router(tokens), expected, atol=1e-5, rtol=1e-5)


@needs_packing
def test_float16_is_not_packed() -> None:
    assert pack_linears(torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float16))) == 0


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_mkl(bias: bool) -> None:
    """For any number of tokens, whatever it was reordered for."""
    linear = torch.nn.Linear(24, 40, bias=bias).requires_grad_(False)
    layer = MklLinear(linear.weight, linear.bias)
    for shape in ((1, 24), (7, 24), (2, 30, 24)):
        tokens = torch.randn(*shape)
        torch.testing.assert_close(layer(tokens), linear(tokens), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.plus(tokens, layer(tokens)), 2 * linear(tokens), atol=1e-5, rtol=1e-5)
    assert is_right()


@needs_packing
@pytest.mark.parametrize("kind", [PackedLinear, pytest.param(MklLinear, marks=needs_mkl), NativeLinear])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_fused_layers(family: str, kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is NativeLinear and operators(torch.float32) is None:
        pytest.skip("needs a C compiler and a CPU with AVX-512")
    for module in (linears, fused_layer):
        monkeypatch.setattr(module, "prefers_mkl", lambda dtype: kind is MklLinear)
        monkeypatch.setattr(module, "prefers_native", lambda dtype: kind is NativeLinear)
    model = ours(family)
    expected = logits(model)
    assert fuse_layers(model.model.layers, model.model.rotary_emb) == 4
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    kinds = {type(module) for module in model.model.layers.modules()}
    if kind is NativeLinear:
        assert {type(layer) for layer in model.model.layers} == {NativeLayer}
    assert kinds & {torch.nn.Linear, PackedLinear, MklLinear} == {kind} - {NativeLinear}


@needs_packing
@pytest.mark.parametrize(("family", "changes"), [
    ("qwen3", {}),  # norms of queries and keys
    ("gemma2", {}),  # four norms a layer
    ("phi3", {}),  # other projections
    ("llama", {"attention_bias": True}),
    ("llama", {"hidden_act": "gelu"}),  # has the form, and disagrees
])  # fmt: skip
def test_other_layers_are_not_fused(family: str, changes: dict[str, Any]) -> None:
    model = ours(family, **changes)
    expected = logits(model)
    assert fuse_layers(model.model.layers, model.model.rotary_emb) == 0
    assert not any(isinstance(layer, FusedLayer | NativeLayer) for layer in model.model.layers)
    torch.testing.assert_close(logits(model), expected)


MOE = {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
       "topk_group": 1}  # fmt: skip
SCALED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4,
          "llama_4_scaling_beta": 0.5}  # fmt: skip


@needs_packing
@pytest.mark.parametrize("kind", ["in C", "of a library"])
@pytest.mark.parametrize(("name", "changes", "num_fused"), [
    ("HeliumConfig", {"head_dim": 16}, 0),  # turns neighbours
    ("Ernie4_5Config", {"head_dim": 16}, 0),  # the same, with angles in float32
    ("SmolLM3Config", {"no_rope_layers": [1, 0, 1, 1]}, 3),  # turns nothing in a layer
    ("GraniteSWAConfig", {"attention_multiplier": 0.1, "layer_rope_theta": [0, 1e4, 0, 1e5]}, 4),  # gets no angles
    ("Ministral3Config", {"head_dim": 16, "rope_parameters": SCALED}, 0),  # scales queries by their positions
    ("Glm4MoeConfig", MOE, 0),  # turns half a head
    ("MiMoV2FlashConfig", MOE | {"v_head_dim": 16}, 0),  # has angles by kinds of layers
])  # fmt: skip
def test_layers_that_rotate_in_another_way(
    name: str, changes: dict[str, Any], num_fused: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have all of a Llama's parts."""
    if kind == "in C" and operators(torch.float32) is None:
        pytest.skip("needs a C compiler and a CPU with AVX-512")
    config = getattr(transformers, name, None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    monkeypatch.setattr(fused_layer, "prefers_native", lambda dtype: kind == "in C")
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config(**COMMON | changes), dtype=torch.float32)
    for weight in model.requires_grad_(False).parameters():
        weight.normal_(0, 0.15)
    model.eval().set_attn_implementation(ATTENTION_NAME)
    expected = logits(model)
    assert fuse_layers(model.model.layers, model.model.rotary_emb) == num_fused
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


def test_values_narrower_than_keys_are_no_llamas() -> None:
    layer = ours("llama").model.layers[0]
    assert has_llama_form(layer, lambda weight: True)
    layer.self_attn.v_proj = torch.nn.Linear(64, 24, bias=False)
    assert not has_llama_form(layer, lambda weight: True)


def check_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of all numbers of tokens: right, and by no more than some dozen sizes, for each of which oneDNN keeps
    code."""
    sizes: set[int] = set()
    plain, plus = linears._linear, linears._linear_with

    def spy(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.add(rows.numel() // rows.shape[-1])
        out: torch.Tensor = plain(rows, *rest)
        return out

    def spy_with(rows: torch.Tensor, other: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.add(len(rows))
        out: torch.Tensor = plus(rows, other, *rest)
        return out

    monkeypatch.setattr(linears, "_linear", spy)
    monkeypatch.setattr(linears, "_linear_with", spy_with)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(6, 10, generator=generator), torch.randn(6, generator=generator)
    layer = PackedLinear(weight, bias)
    for num_tokens in [*range(1, 300), *range(300, 2049, 37)]:
        tokens = torch.randn(num_tokens, 10, generator=generator)
        other = torch.randn(num_tokens, 6, generator=generator)
        expected = tokens @ weight.T + bias
        torch.testing.assert_close(layer(tokens[None]), expected[None])
        torch.testing.assert_close(layer.plus(tokens, other), expected + other)
        torch.testing.assert_close(layer.times(tokens, other), expected * other, atol=1e-4, rtol=1e-4)
    assert len(sizes) <= 40
    assert set(range(1, 8)) <= sizes  # few tokens are computed as they are


@needs_packing
def test_products_of_any_number_of_tokens_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_few_sizes(monkeypatch)


def test_padding_is_at_most_a_quarter() -> None:
    for num_tokens in range(1, 10_000):
        assert num_tokens <= padded_size(num_tokens) <= 1.25 * num_tokens
