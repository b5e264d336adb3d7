"""What TRITON_MLA's steps launch is among what `warm_up` compiles: drawn layers and traffic."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache import kv_cache
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import KVCacheSpec, Limits, MLASpec, plan_groups

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
examples = pytest.importorskip("attn_backends.kernels.examples")
variants = pytest.importorskip("attn_backends.kernels.variants")
triton_mla = pytest.importorskip("attn_backends.backends.mla.triton_mla.backend").TritonMLABackend

mla_impl = pytest.importorskip("attn_backends.backends.mla.impl")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")

CPU = torch.device("cpu")
MACHINES = {
    "H200": launching.Machine(132, 227 << 10, True, True, True),
    "A100": launching.Machine(108, 163 << 10, False, False, False),
    "B200": launching.Machine(148, 227 << 10, True, False, True),
}


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent rows are written by the kernel, as on a GPU, and context is gathered without memory."""
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)
    monkeypatch.setattr(
        mla_impl, "gather_slots", lambda latents, slots, _: latents.new_empty(len(slots), latents.shape[-1])
    )


def draw_spec(numbers: Random) -> MLASpec:
    dtype = numbers.choice((torch.bfloat16, torch.float16, torch.float32))
    cached = numbers.choice((dtype, torch.float8_e4m3fn, torch.float8_e5m2))
    rank, rope = numbers.choice(((512, 64), (512, 64), (256, 32), (16, 8)))
    nope, v_dim = numbers.choice(((128, 128), (128, 128), (64, 64), (24, 40), (192, 256)))
    return MLASpec(numbers.choice((1, 8, 16, 32, 128)), kv_lora_rank=rank, qk_rope_head_dim=rope, head_dim=nope + rope,
                   head_dim_vo=v_dim, dtype=dtype, cache_dtype=cached)  # fmt: skip


def draw_common(numbers: Random, limits: Limits, cache: KVCacheSpec, in_graph: bool) -> CommonAttentionMetadata:
    """Rows that decode, and unless they are for a graph, some behind them that do not."""
    query_len = numbers.randint(1, min(8, limits.max_num_tokens))
    num_rows = numbers.randint(1, min(limits.max_num_requests, limits.max_num_tokens // query_len))
    query_lens = [query_len] * num_rows
    if not in_graph and numbers.random() < 0.6:
        num_rows, most = min(5, num_rows), max(1, limits.max_num_tokens // min(5, num_rows))
        query_lens = [numbers.choice((min(query_len, most), numbers.randint(1, most))) for _ in range(num_rows)]
    groups = []
    for i, query_len in enumerate(query_lens):
        context = numbers.randint(0, 3000)
        pages = range(-(-(context + query_len) // cache.page_size))
        groups.append(SequenceGroup(str(i), (SequenceData(context, query_len, pages),)))
    return CommonAttentionMetadata.from_sequence_groups(groups, cache.page_size, CPU)


def run_step(numbers: Random, group: Any, limits: Limits, cache: KVCacheSpec, state: Any,
             common: CommonAttentionMetadata) -> None:  # fmt: skip
    spec, num_tokens = group.spec, common.num_tokens
    builder = triton_mla.get_builder_cls()(group, cache, limits, CPU)
    weight = examples.empty(spec.num_qo_heads * (spec.qk_nope_head_dim + spec.head_dim_vo), spec.kv_lora_rank,
                            dtype=spec.dtype)  # fmt: skip
    impl = triton_mla.impl_cls(spec, cache, CPU, kv_b_proj=weight, k_scale=numbers.choice((1.0, 0.5)))
    step = state.begin_forward(builder.build(0, common))
    latents = examples.empty(9, cache.page_size, spec.latent_dim, dtype=spec.cache_dtype)
    pool = KVCache(latents, latents[..., :0])
    query = examples.empty(num_tokens, spec.num_qo_heads, spec.head_dim, dtype=spec.dtype)
    sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim)
    key, value = (examples.empty(num_tokens, size, dtype=spec.dtype) for size in sizes)
    if numbers.random() < 0.5:
        key, value = examples.empty(num_tokens, spec.latent_dim, dtype=spec.dtype).split(sizes, 1)
    lse = torch.empty(num_tokens, spec.num_qo_heads, device="meta") if numbers.random() < 0.5 else None
    impl.forward(query, key, value, pool, step, lse=lse)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 8))])
def test_traffic_asks_for_what_was_listed(seed: int, machine: Any) -> None:
    numbers = Random(f"{seed} {machine}")
    spec, cache = draw_spec(numbers), KVCacheSpec(64, numbers.choice((1, 16, 32, 64)))
    limits = Limits(numbers.choice((1, 40, 150)), numbers.choice((4, 64, 2048)), 4096)
    (group,) = plan_groups({0: spec})
    with variants.listing(machine):
        state = triton_mla.state_cls([group], cache, limits, CPU)
        listed = {variant.key for variant in state.variants()}
    with variants.listing(machine) as asked:
        for _ in range(25):
            run_step(numbers, group, limits, cache, state, draw_common(numbers, limits, cache, False))
        with state.graph_capture(min(limits.max_num_requests, limits.max_num_tokens)):
            common = draw_common(numbers, limits, cache, True)
            clone = state.graph_clone(common.num_reqs, common.max_query_len)
            run_step(numbers, group, limits, cache, clone, replace(common, for_graph=True))
    names = {variant.name for variant in asked.variants.values()}
    assert names & {"mla_hopper_kernel", "mla_decode_kernel"}
    assert names > {"mla_combine_kernel", "cut_kernel", "write_kv_kernel"}
    products = names & {"absorb_kernel", "up_project_kernel"}
    wants_products = machine.supports_pdl and spec.dtype is not torch.float32 and spec.qk_nope_head_dim != 24
    assert len(products) == 2 * (wants_products and spec.qk_rope_head_dim > 8)
    if limits.max_num_tokens > 8:  # more than decodes
        assert bool(names & {"prefill_hopper_kernel", "prefill_kernel"}) == any(state.prefills.values())
    missing = [key for key in asked.variants if key not in listed]
    assert not missing, f"{spec} over {cache} within {limits}: {missing[0]}"
