"""FLASH_ATTN_MLA passes the family's conformance kit: over emulated kernels on a CPU, over the real ones on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import KVCacheSpec, MLASpec, Unsupported, select_backend
from attn_backends.backends.mla.flash_attn_mla.state import most_splits, partial_bytes
from attn_backends.registry import validate_options
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.conformance import MLAConformance
from attn_backends.testing.harness import make_layer
from attn_backends.testing.kit.base import WHOLE_PROMPTS
from tests.emulated import flash_attn_mla
from tests.helpers import flash_attn_mla_emulated as emulated


class Small(MLAConformance):
    """Heads that are small but for the 64 columns of RoPE: their prefill is the family's own."""

    def make_spec(self, **changes: Any) -> MLASpec:
        return MLASpec(**{"num_qo_heads": 4, "head_dim": 80, "head_dim_vo": 16, "dtype": self.dtype, **changes})


class ModelShape(MLAConformance):
    """Head dims of DeepSeek's models, whose prefill is FlashAttention's too."""

    dtypes = (torch.bfloat16,)

    def make_spec(self, **changes: Any) -> MLASpec:
        return MLASpec(**{"num_qo_heads": 4, "dtype": self.dtype, **changes})


@pytest.mark.sampled
class TestEmulated(Small):
    backend_name = "FLASH_ATTN_MLA_EMULATED"


@pytest.mark.first
@pytest.mark.rest
class TestEmulatedModelShape(ModelShape):
    backend_name = "FLASH_ATTN_MLA_EMULATED"


INTERFACE = "FLASH_ATTN_MLA_EMULATED_INTERFACE"


@pytest.mark.first
@pytest.mark.rest
class TestEmulatedInterface(Small):
    backend_name = INTERFACE
    dtypes = (torch.bfloat16,)


@pytest.mark.long
class TestEmulatedInterfaceModelShape(ModelShape):
    backend_name = INTERFACE


@pytest.mark.parametrize("shape", ["small_prefill", "mixed_small", WHOLE_PROMPTS], ids=str)
def test_prompts_of_models_by_the_interface(shape: BatchShape | str) -> None:
    """What its own name serves alone: head dims of DeepSeek's models, in chunks and whole."""
    kit = type("Kit", (ModelShape,), {"backend_name": INTERFACE})()
    for cached in (True, False) if shape is WHOLE_PROMPTS else (True,):
        kit.check(kit.make_spec(), [shape], cached=cached)


@pytest.mark.gpu
class TestFlashAttnMLA(Small):
    backend_name = "FLASH_ATTN_MLA"
    device = "cuda"


@pytest.mark.gpu
class TestFlashAttnMLAModelShape(ModelShape):
    backend_name = "FLASH_ATTN_MLA"
    device = "cuda"


@pytest.mark.parametrize(
    ("changes", "page_size", "code"),
    [({}, 64, "page_size"), ({"kv_lora_rank": 256}, 32, "kv_lora_rank"),
     ({"qk_rope_head_dim": 32}, 32, "qk_rope_head_dim"), ({"cache_dtype": torch.float8_e4m3fn}, 32, "cache_dtype"),
     ({"cache_dtype": torch.float16}, 32, "cache_dtype"), ({"dtype": torch.float32}, 32, "dtype")],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], page_size: int, code: str) -> None:
    spec = MLASpec(**{"num_qo_heads": 16, "dtype": torch.bfloat16, **changes})
    name = emulated.EmulatedFlashAttnMLA.get_name()
    with pytest.raises(Unsupported) as refusal:
        select_backend(name, [spec], KVCacheSpec(8, page_size), "cpu")
    assert code in {rejection.code for rejection in refusal.value.rejections}


def test_an_old_schedule_is_seen() -> None:
    """The emulation attends the keys that a schedule knows: what makes a replay without a new plan fail."""
    heads, table = 2, torch.tensor([[0, 1]], dtype=torch.int32)
    q, q_v = torch.randn(1, heads, 64).bfloat16(), torch.randn(1, heads, 512).bfloat16()
    rope, latent = torch.randn(2, 16, 1, 64).bfloat16(), torch.randn(2, 16, 1, 512).bfloat16()
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)

    def call(planned: int) -> torch.Tensor:
        schedule = flash_attn_mla.get_scheduler_metadata(1, 1, 32, heads, 1, 64, torch.full_like(lens, planned))
        made: torch.Tensor = flash_attn_mla.flash_attn_varlen_func(
            q, rope, latent, 1, starts, 32, seqused_k=lens, q_v=q_v, softmax_scale=0.1, causal=True, block_table=table,
            scheduler_metadata=schedule, fa_version=3,
        )  # fmt: skip
        return made

    assert not torch.equal(call(20), call(9))
    assert torch.equal(call(20), call(25))


@pytest.mark.parametrize(
    ("seq_len", "split_bytes", "num_splits"),
    [(100, 1 << 29, 1), (700, 1 << 29, 2), (4096, 1 << 29, 16), (4096, 3 * 16 * 513 * 4, 3), (4096, 1, 1)],
)
def test_rows_are_cut_as_far_as_pays_and_memory_allows(seq_len: int, split_bytes: int, num_splits: int) -> None:
    name, backend = emulated.EmulatedFlashAttnMLA.get_name(), emulated.EmulatedFlashAttnMLA
    batch = random_batch(backend, MLASpec(16, dtype=torch.bfloat16), [seq_len], [1], page_size=32)
    layer = make_layer(backend, batch, options=validate_options(name, {"split_bytes": split_bytes}))
    assert layer.begin(batch).plan.num_splits == num_splits


@pytest.mark.parametrize("heads", [1, 16, 20, 40, 64, 128])
def test_parts_of_rows_fit_the_bytes_that_they_may_take(heads: int) -> None:
    """Of any rows and tokens: one part is taken where not even that fits."""
    spec = MLASpec(heads, dtype=torch.bfloat16)
    for num_rows in range(1, 513):
        for query_len in range(1, 17):
            one = partial_bytes(spec, num_rows * query_len)
            for longest, split_bytes in ((163840, 512 << 20), (1000, 64 << 20), (1, 1)):
                parts = most_splits(spec, num_rows * query_len, longest, split_bytes)
                assert parts == 1 or one * parts <= split_bytes
                assert 1 <= parts <= max(1, longest // 256)


def test_a_schedule_of_another_size_is_not_taken_for_the_captured_one() -> None:
    batch = random_batch(emulated.EmulatedFlashAttnMLA, MLASpec(4, dtype=torch.bfloat16), [40, 17], [1, 1])
    layer = make_layer(emulated.EmulatedFlashAttnMLA, batch)
    plan = layer.begin(batch).plan
    rows = layer.builder.build(0, batch.common()).decode
    held = replace(plan, schedule=torch.cat([plan.schedule, plan.schedule]))
    with pytest.raises(RuntimeError, match=r"its version changed what a schedule's size follows from"):
        layer.state.plan_decode(batch.spec, rows, held)
