"""Families of models through our paged cache against transformers eager: a chunked prompt, then ten decode steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from attn_backends import KVCacheSpec, Limits, SequenceData, SequenceGroup, get_backend
from attn_backends.engine.hf import ATTENTION_NAME, LoadedModel, ModelError, check_config, probe_layers
from attn_backends.engine.runner import ModelRunner
from tests.tiny_models import FAMILIES, tiny_model

PAGE_SIZE = 4
PROMPTS = (23, 1, 12)  # tokens


@dataclass
class Batch:
    """The part of a `ScheduledBatch` that the runner reads, made by hand."""

    rows: list[SequenceData]
    token_ids: np.ndarray
    positions: np.ndarray
    sample_rows: np.ndarray

    @property
    def query_lens(self) -> np.ndarray:
        return np.array([row.query_len for row in self.rows], np.int32)

    def groups(self) -> list[SequenceGroup]:
        return [SequenceGroup(str(i), (row,)) for i, row in enumerate(self.rows)]


def make_batch(texts: list[list[int]], spans: list[tuple[int, int]], pages: np.ndarray) -> Batch:
    """Row i computes tokens `spans[i]` of `texts[i]`."""
    rows = [SequenceData(start, stop - start, pages[i]) for i, (start, stop) in enumerate(spans)]
    tokens = [token for text, (start, stop) in zip(texts, spans, strict=True) for token in text[start:stop]]
    positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
    return Batch(rows, np.array(tokens), positions, np.arange(len(rows)))


def runner_of(model) -> ModelRunner:  # type: ignore[no-untyped-def]
    model.set_attn_implementation(ATTENTION_NAME)
    layers = probe_layers(model)
    loaded = LoadedModel(model, None, layers, 256, 97, frozenset())
    specs = {layer: probe.spec for layer, probe in layers.items()}
    return ModelRunner(
        loaded, get_backend("TORCH"), specs, KVCacheSpec(64, PAGE_SIZE), Limits(8, 64, 64), torch.device("cpu")
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_matches_transformers_eager(family: str) -> None:
    reference, runner = tiny_model(family), runner_of(tiny_model(family))
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in PROMPTS]
    pages = np.random.default_rng(0).permutation(64)[: 3 * 16].reshape(3, 16).astype(np.int32)
    halves = [(0, -(-n // 2)) for n in PROMPTS]
    steps = [halves, [(stop if n > 1 else 0, n) for (_, stop), n in zip(halves, PROMPTS, strict=True)]]
    for _ in range(11):
        for spans in steps:
            logits = runner.run(make_batch(texts, spans, pages))
        for row, text in enumerate(texts):
            with torch.inference_mode():
                expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
            text.append(int(expected.argmax()))
        steps = [[(len(text) - 1, len(text)) for text in texts]]


def test_alternating_layers_make_plan_groups() -> None:
    groups = runner_of(tiny_model("gemma2")).groups
    assert [(group.layers, group.spec.window_left, group.spec.logits_soft_cap) for group in groups] == [
        ((0, 2), 7, 5.0),
        ((1, 3), -1, 5.0),
    ]
    assert groups[0].spec.scale == pytest.approx(24**-0.5)


def test_sinks_reach_the_layer() -> None:
    runner = runner_of(tiny_model("gpt_oss"))
    assert all(impl.sinks is not None and impl.sinks.abs().sum() > 0 for impl in runner.impls.values())


@pytest.mark.parametrize("name", ["BloomConfig", "FalconConfig"])
def test_refuses_models_that_bypass_the_interface(name: str) -> None:
    import transformers

    with pytest.raises(ModelError, match="attention interface"):
        check_config(getattr(transformers, name)())


def test_refuses_a_mask_that_is_hidden() -> None:
    import transformers

    with pytest.raises(ModelError, match="chunked_attention"):
        check_config(transformers.Llama4TextConfig())


def test_refuses_encoder_decoder_models() -> None:
    import transformers

    with pytest.raises(ModelError, match="decoder-only"):
        check_config(transformers.T5Config())


def test_the_models_own_generate_is_refused() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(RuntimeError, match=r"attn_backends\.LLM"):
        model(torch.zeros(1, 2, dtype=torch.long))
