"""Scales of cached keys and values that a checkpoint brings: used layer by layer over an fp8 cache, or refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from attn_backends import LLM, EngineConfig, SamplingParams
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.kv_scales import KVScales, is_kv_scale
from tests.helpers.tiny_models import save_tiny

FP8 = torch.float8_e4m3fn
PROMPTS = ["a", "one two three", "the quick brown fox", "xyz" * 5]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LAYERS = range(4)
Tensors = dict[str, torch.Tensor]
Scales = Mapping[int, tuple[float, float]]


def drawn(seed: int) -> Scales:
    """Scales that matter: by the least of them fp8 overflows, by the largest it has two or three bits of these."""
    rng = random.Random(seed)
    return {layer: (2 ** rng.uniform(-9, 9), 2 ** rng.uniform(-9, 9)) for layer in LAYERS}


def of_attention(scales: Scales) -> Tensors:
    return {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(scale)
        for layer, pair in scales.items()
        for name, scale in zip("kv", pair, strict=True)
    }


def of_projections(scales: Scales) -> Tensors:
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor([scale])
        for layer, pair in scales.items()
        for name, scale in zip("kv", pair, strict=True)
    }


def of_outputs(scales: Scales) -> Tensors:
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.output_scale": torch.tensor([[scale]])
        for layer, pair in scales.items()
        for name, scale in zip("kv", pair, strict=True)
    }


def of_both(scales: Scales) -> Tensors:
    return {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(pair[0]) for layer, pair in scales.items()}


def of_vllm(scales: Scales) -> Tensors:
    return {name.replace("self_attn.", "self_attn.attn."): tensor for name, tensor in of_attention(scales).items()}


FORMS: list[Callable[[Scales], Tensors]] = [of_attention, of_projections, of_outputs, of_both, of_vllm]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_llama: Path) -> Callable[..., Path]:
    """A tiny checkpoint with more tensors, and a scheme of its cache."""

    def make(tensors: Tensors, scheme: Mapping[str, Any] | None = SCHEME, folder: Path = tiny_llama) -> Path:
        made = Path(shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True))
        held = safetensors.torch.load_file(folder / "model.safetensors")
        safetensors.torch.save_file(held | tensors, made / "model.safetensors", {"format": "pt"})
        if scheme is not None:
            config = json.loads((made / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": dict(scheme)}
            (made / "config.json").write_text(json.dumps(config))
        return made

    return make


def engine(folder: Path, **cache: object) -> LLM:
    settings = {"num_pages": 64, "dtype": "float8_e4m3fn", "prefix_caching": False} | cache
    rounded_as_the_reference = {"accelerate": "off", "cache": settings}
    return LLM.from_pretrained(folder, EngineConfig.model_validate(rounded_as_the_reference))


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def scales_of(llm: LLM) -> Scales:
    return {layer: (impl.k_scale, impl.v_scale) for layer, impl in llm.runner.layers.plans.impls.items()}


class Reference:
    """Attention in plain torch over a cache of fp8, which all keys and values go through."""

    def __init__(self, scales: Scales) -> None:
        self.scales = scales
        self.stored: dict[int, list[torch.Tensor]] = {}

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        limit, layer = torch.finfo(FP8).max, module.layer_idx
        new = [
            (tensor / scale).clamp(-limit, limit).to(FP8).float() * scale
            for tensor, scale in zip((key, value), self.scales[layer], strict=True)
        ]
        if layer in self.stored:
            new = [torch.cat(pair, 2) for pair in zip(self.stored[layer], new, strict=True)]
        key, value = self.stored[layer] = new
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = query @ key.mT * named["scaling"]
        if query.shape[2] > 1:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None


def expected(folder: Path, scales: Scales, prompts: list[list[int]]) -> Iterator[list[int]]:
    """Greedy tokens of transformers' own model over the reference's cache."""
    for prompt in prompts:
        transformers.AttentionInterface.register("fp8_reference", Reference(scales))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="fp8_reference").eval()
        made: list[int] = []
        with torch.inference_mode():
            for _ in range(GREEDY.max_tokens):
                new = prompt if not made else made[-1:]
                first = len(prompt) + len(made) - len(new)
                positions = torch.arange(first, first + len(new))[None]
                logits = model(torch.tensor([new]), position_ids=positions, use_cache=False).logits
                made.append(int(logits[0, -1].argmax()))
        yield made


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_of_a_reference_that_applies_the_scales(
    seed: int, checkpoint: Callable[..., Path], tiny_llama: Path
) -> None:
    scales, form = drawn(seed), FORMS[seed]
    if form is of_both:
        scales = {layer: (k, k) for layer, (k, _) in scales.items()}
    llm = engine(checkpoint(form(scales)))
    assert scales_of(llm) == {layer: pytest.approx(pair) for layer, pair in scales.items()}
    found = tokens(llm)
    prompts = [llm.model.tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert found == list(expected(tiny_llama, scales, prompts))
    assert found != tokens(engine(tiny_llama)), "these scales change nothing: the case shows nothing"


def test_a_config_wins_and_other_caches_need_none(
    checkpoint: Callable[..., Path], tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = drawn(7)
    folder = checkpoint(of_attention(scales))
    assert set(scales_of(engine(folder, k_scale=0.5, v_scale=2.0)).values()) == {(0.5, 2.0)}
    half = scales_of(engine(folder, k_scale=0.5))
    assert half == {layer: (0.5, pytest.approx(v)) for layer, (_, v) in scales.items()}
    plain = engine(folder, dtype="auto")
    assert set(scales_of(plain).values()) == {(1.0, 1.0)}
    assert "set cache.dtype: float8_e4m3fn to use them" in caplog.text
    assert tokens(plain) == tokens(engine(tiny_llama, dtype="auto"))
    assert set(scales_of(engine(tiny_llama)).values()) == {(1.0, 1.0)}


def test_a_latent_row_has_the_scale_of_keys(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    latent = save_tiny(tmp_path / "latent", "deepseek_v3")
    scales = drawn(3)
    llm = engine(checkpoint(of_attention(scales), folder=latent))
    assert scales_of(llm) == {layer: (pytest.approx(k), 1.0) for layer, (k, _) in scales.items()}
    of_values = {name: scale for name, scale in of_attention(scales).items() if name.endswith("v_scale")}
    with pytest.raises(ModelError, match="only the v_scale of layer 0"):
        engine(checkpoint(of_values, folder=latent))


def test_layers_that_the_model_does_not_run_are_left_out(checkpoint: Callable[..., Path]) -> None:
    """Whatever scales they have, of a form that is not served too."""
    scales = drawn(4)
    more = {"model.layers.4.self_attn.k_scale": torch.ones(2), "vision.layers.0.attn.k_scale": torch.tensor(4.0)}
    assert scales_of(engine(checkpoint(of_attention(scales) | more)))[0] == pytest.approx(scales[0])


NAME = "model.layers.2.self_attn.k_scale"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({NAME: torch.ones(2)}, rf"{NAME} has shape \[2\]: scales by head, channel or token are not served"),
        ({NAME: torch.ones(2, 1, 1)}, r"has shape \[2, 1, 1\]"),
        ({NAME: torch.tensor(0.0)}, rf"{NAME} is 0.0; a scale is a positive number"),
        ({NAME: torch.tensor(-1.0)}, "is -1.0"),
        ({NAME: torch.tensor(float("nan"))}, "is nan"),
        ({NAME: None}, "only the v_scale of layer 2"),
        ({NAME: None, NAME.replace("k_", "v_"): None}, "of layers 0, 1, 3, and none of 2"),
        ({NAME.replace("k_", "kv_"): torch.tensor(77.0)}, "another k_scale of layer 2|another v_scale of layer 2"),
        ({NAME.replace("k_scale", "k_zero_point"): torch.tensor(0)}, "zero points"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_with_what_to_type(
    change: dict[str, torch.Tensor | None], words: str, checkpoint: Callable[..., Path]
) -> None:
    tensors: dict[str, torch.Tensor | None] = {**of_attention(drawn(1)), **change}
    folder = checkpoint({name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ModelError, match=rf"(?s)({words}).*set cache\.k_scale and cache\.v_scale"):
        engine(folder)
    assert engine(folder, k_scale=1.0, v_scale=1.0)
    assert engine(folder, dtype="auto")


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({"strategy": "attn_head"}, "strategy attn_head"),
        ({"strategy": "token", "dynamic": True}, "strategy token, dynamic True"),
        ({"num_bits": 4}, "num_bits 4"),
        ({"type": "int"}, "type int"),
        ({"symmetric": False}, "symmetric False"),
    ],
    ids=str,
)
def test_a_scheme_of_another_kind_is_refused(
    scheme: dict[str, object], words: str, checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=f"is quantised with {words}; served is one static fp8 scale a layer"):
        engine(checkpoint(of_attention(drawn(2)), SCHEME | scheme))


def test_modelopts_file_is_read(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(of_projections(drawn(2)), None)
    quantization = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert scales_of(engine(folder)) == {layer: pytest.approx(pair) for layer, pair in drawn(2).items()}
    quantization["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    with pytest.raises(ModelError, match="kv_cache_quant_algo NVFP4"):
        engine(folder)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv", "input_scale", "qweight", "weight_packed"])
def test_quantised_weights_are_not_read_without_their_scales(checkpoint: Callable[..., Path], end: str) -> None:
    folder = checkpoint({f"model.layers.1.mlp.up_proj.{end}": torch.tensor(0.01)}, None)
    with pytest.raises(
        ModelError, match=rf"quantised.* 1 tensors, such as model\.layers\.1\.mlp\.up_proj\.{end}, would"
    ):
        engine(folder)


def test_names_that_are_no_scale_of_a_cache() -> None:
    for name in ("model.layers.0.mlp.down_proj.weight_scale", "model.layers.0.self_attn.q_scale", "k_scale",
                 "model.layers.0.self_attn.k_proj.weight", "model.layers.x.self_attn.k_scale"):  # fmt: skip
        assert not is_kv_scale(name)
    assert KVScales() == (1.0, 1.0)
