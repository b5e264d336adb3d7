"""Families of models through our paged cache against transformers eager: a chunked prompt, then ten decode steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from attn_backends import KVCacheSpec, Limits, SamplingParams, get_backend
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.hf import ATTENTION_NAME, check_config, most_positions
from attn_backends.engine.models.latent_layer import use_latent_attention
from attn_backends.engine.models.load import probe_layers
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.engine.request import Request, ScheduledBatch
from attn_backends.engine.runner import ModelRunner
from tests.helpers.tiny_models import COMMON, FAMILIES, LATENT_FAMILIES, tiny_model

PAGE_SIZE = 4
PROMPTS = (23, 1, 12)  # tokens


def run(runner: ModelRunner, requests: list[Request], spans: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Compute tokens `spans[i]` of request i; the logits of those whose last token is among them, by request."""
    for request, (start, _) in zip(requests, spans, strict=True):
        request.num_computed_tokens = start
    rows = [(request, stop - start) for request, (start, stop) in zip(requests, spans, strict=True)]
    batch = runner.arrange(ScheduledBatch.from_rows(rows))
    names = [batch.requests[row].request_id for row in batch.sample_rows]
    return dict(zip(names, runner.run(batch).clone(), strict=True))


def runner_of(model) -> ModelRunner:  # type: ignore[no-untyped-def]
    model.set_attn_implementation(ATTENTION_NAME)
    backend = "TORCH_MLA" if use_latent_attention(model) else "TORCH"
    layers = probe_layers(model)
    loaded = LoadedModel(model, None, layers, 256, 97, frozenset())
    specs = {layer: probe.spec for layer, probe in layers.items()}
    return ModelRunner(
        loaded, get_backend(backend), specs, KVCacheSpec(64, PAGE_SIZE), Limits(8, 64, 64), torch.device("cpu")
    )


@pytest.mark.parametrize("family", [*FAMILIES, *LATENT_FAMILIES])
def test_matches_transformers_eager(family: str) -> None:
    reference, runner = tiny_model(family), runner_of(tiny_model(family))
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in PROMPTS]
    requests = [Request(str(i), text, SamplingParams()) for i, text in enumerate(texts)]
    pages = np.random.default_rng(0).permutation(64)[: 3 * 16].reshape(3, 16).astype(np.int32)
    for request, own in zip(requests, pages, strict=True):
        request.add_pages(own)
    halves = [(0, -(-n // 2)) for n in PROMPTS]
    steps = [halves, [(stop if n > 1 else 0, n) for (_, stop), n in zip(halves, PROMPTS, strict=True)]]
    for _ in range(11):
        for spans in steps:
            logits = run(runner, requests, spans)
        for request in requests:
            with torch.inference_mode():
                expected = reference(torch.tensor([request.token_ids]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[request.request_id], expected, atol=1e-5, rtol=1e-5)
            request.token_ids.append(int(expected.argmax()))
        steps = [[(len(request.token_ids) - 1, len(request.token_ids)) for request in requests]]


def test_alternating_layers_make_plan_groups() -> None:
    groups = runner_of(tiny_model("gemma2")).layers.plans.groups
    assert [(group.layers, group.spec.window_left, group.spec.logits_soft_cap) for group in groups] == [
        ((0, 2), 7, 5.0),
        ((1, 3), -1, 5.0),
    ]
    assert groups[0].spec.scale == pytest.approx(24**-0.5)


def test_sinks_reach_the_layer() -> None:
    runner = runner_of(tiny_model("gpt_oss"))
    assert all(impl.sinks is not None and impl.sinks.abs().sum() > 0 for impl in runner.layers.plans.impls.values())


@pytest.mark.parametrize("name", ["BloomConfig", "FalconConfig"])
def test_refuses_models_that_bypass_the_interface(name: str) -> None:
    with pytest.raises(ModelError, match="attention interface"):
        check_config(getattr(transformers, name)())


def test_refuses_a_mask_that_is_hidden() -> None:
    with pytest.raises(ModelError, match="chunked_attention"):
        check_config(transformers.Llama4TextConfig())


def test_refuses_encoder_decoder_models() -> None:
    with pytest.raises(ModelError, match="decoder-only"):
        check_config(transformers.T5Config())


def test_the_models_own_generate_is_refused() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(RuntimeError, match=r"attn_backends\.LLM"):
        model(torch.zeros(1, 2, dtype=torch.long))


def with_our_attention(config_class: str, model_class: str, **settings: object) -> Any:
    config = getattr(transformers, config_class)(**COMMON | settings)
    return getattr(transformers, model_class)._from_config(config, attn_implementation=ATTENTION_NAME).eval()


def test_refuses_a_window_that_is_in_the_mask_alone() -> None:
    moe = {"num_local_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(ModelError, match="layer 0 of PhimoeForCausalLM is 'sliding_attention', whose mask does not"):
        probe_layers(with_our_attention("PhimoeConfig", "PhimoeForCausalLM", sliding_window=5, **moe))
    probe_layers(with_our_attention("PhimoeConfig", "PhimoeForCausalLM", sliding_window=None, **moe))


def test_refuses_layers_that_are_not_causal() -> None:
    with pytest.raises(ModelError, match=r"layer 0 of BertLMHeadModel lets tokens see those behind them.*is_decoder"):
        probe_layers(with_our_attention("BertConfig", "BertLMHeadModel"))


def test_refuses_models_that_drop_keyword_arguments() -> None:
    with pytest.raises(ModelError, match="NemotronForCausalLM does not hand keyword arguments on to its attention"):
        probe_layers(with_our_attention("NemotronConfig", "NemotronForCausalLM"))


def test_refuses_models_that_do_not_run_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_our_attention("LlamaConfig", "LlamaForCausalLM")

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("'NoneType' object is not subscriptable")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not run .* Use a model that does .*NoneType"):
        probe_layers(model)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("rope", "changes", "most"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, {}, 128),
        (LONG, {"original_max_position_embeddings": 32}, 32),
        (LONG | {"original_max_position_embeddings": 48}, {}, 48),
        ({"full_attention": LONG | {"original_max_position_embeddings": 40}}, {}, 40),
    ],
)
def test_one_set_of_angles_for_all_of_a_request(rope: dict[str, Any], changes: dict[str, Any], most: int) -> None:
    config = SimpleNamespace(max_position_embeddings=128, rope_parameters=rope, **changes)
    assert most_positions(config) == most


def test_longrope_is_served_as_far_as_its_short_angles_reach() -> None:
    """A request's tokens are its own, whatever runs beside it and however its prompt is cut."""
    changes = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": LONG}
    config = transformers.Phi3Config(**(COMMON | changes))
    assert most_positions(config) == 32
    assert most_positions(transformers.Phi3Config(**COMMON)) == COMMON["max_position_embeddings"]


@pytest.mark.parametrize("window", [0, -1])
def test_refuses_windows_without_the_own_key(window: int) -> None:
    words = f"layer 0 with sliding_window={window}; served: 1 and more, or None for no window. Set sliding_window"
    with pytest.raises(ModelError, match=words):
        probe_layers(with_our_attention("MistralConfig", "MistralForCausalLM", sliding_window=window))
    layers = probe_layers(with_our_attention("MistralConfig", "MistralForCausalLM", sliding_window=1))
    assert [layer.spec.window_left for layer in layers.values()] == [0] * len(layers)
