"""Eager steps of one shape that are begun before any of their layers runs: each has lists of its own."""

from __future__ import annotations

import random

import pytest
import torch

from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, MLASpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import make_layer
from tests.helpers.interpreted import interpreted, only_interpreted

LAYERS = {
    "TRITON": AttentionSpec(4, 2, 32),
    "TRITON_MLA": MLASpec(4, kv_lora_rank=32, qk_rope_head_dim=16, head_dim=48, head_dim_vo=32),
}

test_interpreted, test_more_interpreted = interpreted(__file__)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LAYERS)
@only_interpreted
def test_steps_run_in_any_order(name: str, seed: int) -> None:
    check(name, seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LAYERS)
def test_steps_run_in_any_order_on_a_gpu(name: str, seed: int) -> None:
    check(name, seed, "cuda")


def check(name: str, seed: int, device: str) -> None:
    rng, spec, backend = random.Random(f"begun {seed}"), LAYERS[name], get_backend(name)
    query_lens = [rng.choice([1, 1, 2, 40]) for _ in range(rng.choice([1, 2, 4]))]
    batches = [
        random_batch(backend, spec, [rng.randint(length, 250) for length in query_lens], query_lens, device=device,
                     seed=number, num_pages=96)
        for number in range(3)
    ]  # fmt: skip
    alone = [make_layer(backend, *batches).run(batch).output for batch in batches]
    layer = make_layer(backend, *batches)
    steps = [layer.begin(batch) for batch in batches]
    for number in rng.sample(range(3), 3):
        torch.testing.assert_close(layer.forward(batches[number], steps[number]).output, alone[number])
