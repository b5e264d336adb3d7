"""FLASHINFER as FlashInfer's documents have decode wrappers: a cache as one tensor, and both workspaces replaced."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCache, Limits, MLASpec, plan_groups
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.cache.views import as_kv_cache, layer_cache
from attn_backends.spec import KVCacheSpec, Layout
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Result, assert_matches, make_layer, make_layers, run_backend
from tests.helpers.flashinfer_emulated import EmulatedFlashInfer, EmulatedState

SPEC = AttentionSpec(8, 2, 64, dtype=torch.float16)


def in_one_tensor(pool: KVCache, layout: Layout) -> torch.Tensor:
    """[num_pages, 2, page_size, num_kv_heads, head_dim], or the two in the middle the other way round in HND."""
    ordered = [cached if layout == "NHD" else cached.transpose(1, 2) for cached in pool]
    return torch.stack(ordered, dim=1).contiguous()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_as_one_tensor(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are given views of it, new keys and values stand in it, and nothing is copied."""
    batch = random_batch(EmulatedFlashInfer, SPEC, [40, 17, 1, 60], [1, 1, 1, 9], layout=layout)
    pool, after = batch.fresh_pool(), batch.pool_after()
    assert pool is not None
    assert after is not None
    kv_cache = in_one_tensor(pool, layout)
    given: list[int] = []
    from tests.emulated.flashinfer_modules import AttentionModule

    kept = AttentionModule.paged_run

    def watched(module: AttentionModule, *args: Any) -> None:
        given.extend((args[4].data_ptr(), args[5].data_ptr()))
        kept(module, *args)

    monkeypatch.setattr(AttentionModule, "paged_run", watched)
    result = run_backend(EmulatedFlashInfer, batch, kv_cache=as_kv_cache(kv_cache, layout))
    assert_matches(Result(result.output, None, None), batch, layout)
    assert set(given) == {kv_cache[:, 0].data_ptr(), kv_cache[:, 1].data_ptr()}
    assert torch.equal(kv_cache.nan_to_num(7.0), in_one_tensor(after, layout).nan_to_num(7.0))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_layer_takes_it_as_the_document_does(layout: Layout) -> None:
    """`wrapper.run(q, kv_cache)`, for each layer of a step: several layers, each with a tensor of its own."""
    batch = random_batch(EmulatedFlashInfer, SPEC, [40, 17, 1, 60], [1, 1, 1, 1], layout=layout)
    layer, pool, after = make_layer(EmulatedFlashInfer, batch), batch.fresh_pool(), batch.pool_after()
    assert pool is not None
    assert after is not None
    kv_cache_at_layer = [in_one_tensor(pool, layout) for _ in range(3)]
    step = layer.begin(batch)
    for kv_cache in kv_cache_at_layer:
        output = layer.impl.forward(batch.query, batch.key, batch.value, kv_cache, step)
        assert_matches(Result(output, None, None), batch, layout)
        assert torch.equal(kv_cache.nan_to_num(7.0), in_one_tensor(after, layout).nan_to_num(7.0))


def test_a_tensor_that_is_not_the_layers_is_refused() -> None:
    """By its name, with what the layer needs: another layout, another dtype, two in the wrong place, MLA."""
    nhd, hnd = KVCacheSpec(4, 16), KVCacheSpec(4, 16, "HND")
    kv_cache = torch.zeros(4, 2, 16, 2, 64, dtype=torch.float16)
    assert [each.shape for each in layer_cache(kv_cache, SPEC, nhd)] == [(4, 16, 2, 64)] * 2
    assert [each.shape for each in layer_cache(kv_cache.transpose(2, 3), SPEC, hnd)] == [(4, 16, 2, 64)] * 2
    needed = (
        r"kv_cache has shape .* this layer needs \[num_pages, 2, 16, 2, 64\] \(NHD\) in torch.float16, or a KVCache"
    )
    for wrong in (kv_cache.transpose(2, 3), kv_cache.float(), kv_cache.transpose(0, 1), kv_cache[:, 0]):
        with pytest.raises(ValueError, match=needed):
            layer_cache(wrong, SPEC, nhd)
    with pytest.raises(ValueError, match=r"this layer needs .*, 2, 2, 16, 64\] \(HND"):
        layer_cache(kv_cache, SPEC, hnd)
    for spec, why in ((MLASpec(4), "MLA caches one latent row"), (AttentionSpec(8, 2, 64, 32), "unequal dims")):
        with pytest.raises(ValueError, match=f"kv_cache is one tensor, and .*{why}"):
            layer_cache(kv_cache, spec, nhd)


@pytest.mark.parametrize("shape", [(4, 16, 2, 64), (4, 3, 16, 2, 64)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needed: \[num_pages, 2, page_size"):
        as_kv_cache(torch.zeros(shape))


def test_both_workspaces_are_replaced() -> None:
    """Groups and kinds of rows in parts of one int workspace, that do not touch: each plan runs after all are made."""
    numbers = Random(3)
    batches = [
        random_batch(
            EmulatedFlashInfer,
            AttentionSpec(8, 2, 64, window_left=window, dtype=torch.float16),
            [90, 33, 70, 64],
            [1, 1, 7, 20],
            seed=numbers.randrange(99),
        )
        for window in (-1, 20, 5)
    ]
    layers = make_layers(EmulatedFlashInfer, batches)
    owner = layers[0].state
    assert isinstance(owner, EmulatedState)
    floats = torch.zeros(owner.need.float_bytes, dtype=torch.uint8)
    ints = torch.full((owner.int_workspace_bytes + 64,), 0xAB, dtype=torch.uint8)
    [layer.begin(batch) for layer, batch in zip(layers, batches, strict=True)]
    owner.reset_workspace_buffer(floats, ints)
    steps: list[Any] = [layer.begin(batch) for layer, batch in zip(layers, batches, strict=True)]
    wrappers = [plan.wrapper for step in steps for plan in (step.decode, step.prefill)]
    starts = sorted(wrapper._int_workspace_buffer.data_ptr() for wrapper in wrappers)
    assert all(wrapper._float_workspace_buffer is floats for wrapper in wrappers)
    assert all(later - sooner >= owner.need.int_bytes for sooner, later in pairwise(starts))
    assert ints.data_ptr() <= starts[0]
    assert starts[-1] + owner.need.int_bytes <= ints.data_ptr() + owner.int_workspace_bytes
    for layer, step, batch in zip(layers, steps, batches, strict=True):
        assert_matches(layer.forward(batch, step), batch, str(batch.spec.window_left))
    assert bool((ints[-64:] == 0xAB).all())


def test_workspaces_that_do_not_do() -> None:
    groups, cache, limits = plan_groups({0: SPEC}), KVCacheSpec(32, 16), Limits(4, 8, 128)
    owner = EmulatedState(groups, cache, limits, "cpu", options=FlashInferOptions())
    floats = torch.zeros(owner.need.float_bytes, dtype=torch.uint8)
    ints = torch.zeros(owner.int_workspace_bytes + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"int_workspace has 100 bytes; these limits need {owner.int_workspace_bytes}"):
        owner.reset_workspace_buffer(floats, ints[:100])
    with pytest.raises(ValueError, match="from a multiple of 16 bytes on"):
        owner.reset_workspace_buffer(floats, ints[1:])
    owner.reset_workspace_buffer(floats, ints)
    with owner.graph_capture(2):
        clone = owner.graph_clone(2)
        with pytest.raises(RuntimeError, match="before graphs are captured"):
            owner.reset_workspace_buffer(floats, ints)
    assert clone.num_rows == 2  # type: ignore[attr-defined]
