"""FLASHMLA under the names of vLLM's document: metadata and builder, what the tile scheduler made, latents of fp8."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import MLASpec, Unsupported, get_backend, select_backend
from attn_backends.backends.mla.flashmla.backend import FlashMLABackend
from attn_backends.backends.mla.flashmla.library import FP8, load_kernels
from attn_backends.backends.mla.flashmla.metadata import FlashMLAMetadata, FlashMLAMetadataBuilder
from attn_backends.backends.mla.flashmla.options import FlashMLAOptions
from attn_backends.spec import KVCacheSpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.harness import graph_batch
from attn_backends.testing.harness import Layer, assert_matches, assert_pool, make_layer, run_backend
from tests.emulated import flashmla, flashmla_older
from tests.helpers import flashmla_emulated

CACHE = KVCacheSpec(32, 64)
SPEC = MLASpec(4, head_dim=96, head_dim_vo=32, dtype=torch.bfloat16)
NEWER, OLDER = flashmla_emulated.EmulatedFlashMLA, flashmla_emulated.EmulatedOlderFlashMLA


def layer_and_batch(backend: Any, *lens: int, queries: int = 1) -> tuple[Layer, Any]:
    batch = random_batch(backend, SPEC, lens, [queries] * len(lens), page_size=64)
    return make_layer(backend, batch), batch


def test_the_documents_names() -> None:
    backend = FlashMLABackend
    assert backend.get_name() == "FLASHMLA"
    assert backend.get_metadata_cls() is FlashMLAMetadata
    assert backend.get_builder_cls() is FlashMLAMetadataBuilder
    names = (backend.get_impl_cls().__name__, backend.get_state_cls().__name__)
    assert names == ("FlashMLAImpl", "FlashMLAState")
    layer, batch = layer_and_batch(OLDER, 70, 9)
    metadata = layer.builder.build(0, batch.common())
    assert type(metadata) is FlashMLAMetadata
    assert type(metadata.decode_metadata) is FlashMLAMetadata
    assert isinstance(layer.builder, FlashMLAMetadataBuilder)
    assert layer.builder.num_q_heads == layer.state.num_q_heads == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("queries", [1, 3])
def test_the_step_has_what_the_tile_scheduler_made(queries: int) -> None:
    layer, batch = layer_and_batch(OLDER, 300, 64, 9, queries=queries)
    step: Any = layer.begin(batch)
    tiles, splits = flashmla_older.get_mla_metadata(torch.tensor([300, 64, 9]).int(), queries * 4, 1)
    assert torch.equal(step.decode_tile_scheduler_metadata, tiles)
    assert torch.equal(step.decode_num_splits, splits)


def test_the_newer_generation_makes_them_in_the_first_call() -> None:
    layer, batch = layer_and_batch(NEWER, 300, 64, 9)
    step: Any = layer.begin(batch)
    assert (step.decode_tile_scheduler_metadata, step.decode_num_splits) == (None, None)
    layer.forward(batch, step)
    tiles, splits = flashmla_older.get_mla_metadata(torch.tensor([300, 64, 9]).int(), 4, 1)
    assert torch.equal(step.decode_tile_scheduler_metadata, tiles)
    assert torch.equal(step.decode_num_splits, splits)


def test_a_graphs_tensors_stay_and_are_made_anew() -> None:
    layer, batch = layer_and_batch(OLDER, 300, 64, 9)
    other = random_batch(OLDER, SPEC, [20, 500], [1, 1], page_size=64)
    layer = make_layer(OLDER, batch, other, num_padded_reqs=4)
    with layer.state.graph_capture(4):
        clone = layer.state.graph_clone(4)
    steps: list[Any] = []
    for each, lens in ((batch, [300, 64, 9, 0]), (other, [20, 500, 0, 0])):
        steps.append(clone.begin_forward(layer.builder.build(0, graph_batch(each, 4, 1))))
        tiles, splits = flashmla_older.get_mla_metadata(torch.tensor(lens).int(), 4, 1)
        assert torch.equal(steps[-1].decode_tile_scheduler_metadata, tiles)
        assert torch.equal(steps[-1].decode_num_splits, splits)
    first, second = steps
    assert first.decode_tile_scheduler_metadata.data_ptr() == second.decode_tile_scheduler_metadata.data_ptr()
    assert first.decode_num_splits.data_ptr() == second.decode_num_splits.data_ptr()


def test_a_step_without_decode_rows_has_none() -> None:
    layer, batch = layer_and_batch(OLDER, 30, queries=30)
    step: Any = layer.begin(batch)
    assert (step.decode_tile_scheduler_metadata, step.decode_num_splits) == (None, None)


# Latents of fp8.


@pytest.mark.parametrize("seed", range(6))
def test_latents_of_fp8_where_the_library_has_them(seed: int) -> None:
    numbers = Random(f"fp8 {seed}")
    spec = replace(SPEC, num_qo_heads=(heads := numbers.choice((1, 4, 10))), num_kv_heads=heads, cache_dtype=FP8)
    rows = sorted(numbers.choice((1, 1, 2, 12)) for _ in range(numbers.randint(1, 4)))
    lens = [row + numbers.choice((0, numbers.randint(1, 300))) for row in rows]
    batch = random_batch(NEWER, spec, lens, rows, page_size=64, k_scale=numbers.uniform(0.3, 3.0), fp8_queries=True)
    result = run_backend(NEWER, batch, want_lse=True, num_padded_reqs=numbers.choice((0, 2)))
    assert_matches(result, batch, f"{rows} of {lens}")
    assert_pool(result.kv_cache, batch.pool_after(), "fp8", batch.has_exact_scales)


def test_latents_of_fp8_where_it_lacks_them() -> None:
    asked = replace(SPEC, cache_dtype=FP8)
    with pytest.raises(Unsupported, match=r"cache_dtype: got float8_e4m3fn of tests\.emulated\.flashmla_older; "
                       r"supported: bfloat16, float16\. Leave cache\.dtype out"):  # fmt: skip
        select_backend("FLASHMLA_EMULATED_OLDER", [asked], CACHE, "cpu")
    assert select_backend("FLASHMLA_EMULATED", [asked], CACHE, "cpu").backend is get_backend("FLASHMLA_EMULATED")
    assert OLDER.reject_set_up(asked, CACHE, "cpu", FlashMLAOptions(provider="vllm"))


def test_vllms_functions_for_fp8_are_found_in_their_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not in the module that has the others."""
    home = ModuleType("vllm.v1.attention.ops.flashmla")
    vars(home).update({name: getattr(flashmla, name) for name in vars(flashmla) if name.endswith("_fp8")})
    found = {"vllm.third_party.flashmla.flash_mla_interface": flashmla_older, home.__name__: home}
    monkeypatch.setattr("importlib.import_module", found.__getitem__)
    kernels = load_kernels("vllm")
    assert kernels.fp8 == (flashmla.get_mla_metadata_dense_fp8, flashmla.flash_mla_with_kvcache_fp8)
    del found[home.__name__]
    assert load_kernels("vllm").fp8 is None
