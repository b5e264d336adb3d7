"""What every impl of ours asks of a call's tensors, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.helpers.flash_attn_backends
import tests.helpers.flash_attn_mla_emulated
import tests.helpers.flashinfer_emulated
import tests.helpers.flashinfer_mla_emulated
import tests.helpers.flashmla_emulated  # noqa: F401
from attn_backends import get_backend
from attn_backends.interface import Plans
from attn_backends.interface.impl import check_planned_for
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, MLASpec
from attn_backends.testing.harness import make_layer
from attn_backends.testing.kit.base import KitBase

NAMES = ("TORCH", "TORCH_MLA", "FLASHINFER_EMULATED", "FLASH_ATTN_VLLM_FA3_EMULATED", "FLASHINFER_MLA_EMULATED",
         "FLASHMLA_EMULATED", "FLASH_ATTN_MLA_EMULATED")  # fmt: skip


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "too few queries": ({"query": lambda t: t[:-1]}, r"query has shape .* need \("),
    "another dtype": ({"query": lambda t: t.double()}, r"query has shape .* in torch.float64"),
    "output with a head too few": ({"output": lambda t: t[:, :-1]}, "output has shape"),
    "output of one row": ({"output": lambda t: t[:1].expand_as(t)}, "output has strides .* same memory: pass a tensor"),
    "LSE of heads first": ({"lse": lambda t: t.T}, "lse has shape"),
    "LSE in bfloat16": ({"lse": lambda t: t.bfloat16()}, "lse has shape .* in torch.bfloat16"),
    "a key too few": ({"key": lambda t: t[:-1]}, r"key is of shape .* tokens of \(.* a row for every one"),
    "narrow values": ({"value": lambda t: t[..., :-1]}, "value is of shape"),
    "keys alone": ({"value": lambda t: None}, "value is not given"),
}


def check_refused(name: str, call: str) -> None:
    kit = type("Kit", (KitBase,), {"backend_name": name})()
    batch = kit.make_batch(kit.make_spec(), "mixed_small")
    layer = make_layer(kit.backend, batch)
    given = {
        "query": batch.query, "key": batch.key, "value": batch.value,
        "output": torch.empty(*batch.query.shape[:2], batch.spec.head_dim_vo, dtype=batch.spec.dtype),
        "lse": torch.empty(batch.query.shape[:2]),
    }  # fmt: skip
    changes, told = CALLS[call]
    given |= {name: change(given[name]) for name, change in changes.items()}
    pool = batch.fresh_pool()
    assert pool is not None
    before = [tensor.clone() for tensor in pool]
    with pytest.raises(ValueError, match=told):
        layer.impl.forward(given["query"], given["key"], given["value"], pool, layer.begin(batch), given["output"],
                           lse=given["lse"])  # fmt: skip
    for tensor, was in zip(pool, before, strict=True):
        torch.testing.assert_close(tensor, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_other_tensors_are_refused_by_name(name: str, call: str) -> None:
    check_refused(name, call)


@pytest.mark.parametrize("name", ["key", "value"])
def test_caches_of_one_page_for_all_are_refused(name: str) -> None:
    kit = type("Kit", (KitBase,), {"backend_name": "TORCH"})()
    batch = kit.make_batch(kit.make_spec(), "mixed_small")
    layer, pool = make_layer(kit.backend, batch), batch.fresh_pool()
    assert pool is not None
    one_page = pool._replace(**{name: getattr(pool, name)[:1].expand_as(getattr(pool, name))})
    with pytest.raises(ValueError, match=rf"kv_cache.{name} has strides .* same memory, .* allocate_kv_cache"):
        layer.impl.forward(batch.query, batch.key, batch.value, one_page, layer.begin(batch))


def test_steps_of_layers_of_another_kind_are_refused_by_what_differs() -> None:
    """As those of phases are, which share a class: MLA's layers have more than others."""
    plain, latent = (
        AttentionSpec(4, 4, 24, 16),
        MLASpec(4, head_dim=24, head_dim_vo=16, kv_lora_rank=32, qk_rope_head_dim=8),
    )
    for planned, spec in ((plain, latent), (latent, plain)):
        with pytest.raises(ValueError, match="differ from this one in kv_lora_rank, qk_rope_head_dim: give the layer"):
            check_planned_for(planned, spec)


def test_layers_of_a_group_share_its_spec() -> None:
    """One object, which is sooner compared with a step's, though an engine gives each layer a spec of its own."""
    specs = {layer: AttentionSpec(4, 4, 16, window_left=window) for layer, window in enumerate((7, -1, 7, 7))}
    plans = Plans(get_backend("TORCH"), specs, KVCacheSpec(4, 16), Limits(2, 8, 32), "cpu")
    assert list(plans.specs) == [0, 1, 2, 3]
    for group in plans.groups:
        assert all(plans.bind(layer).spec is group.spec == specs[layer] for layer in group.layers)
