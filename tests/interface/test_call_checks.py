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
from attn_backends import CommonAttentionMetadata, get_backend, validate_options
from attn_backends.interface import Plans
from attn_backends.interface.impl import check_planned_for
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, MLASpec, plan_groups
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.harness import make_layer
from attn_backends.testing.kit.base import KitBase

READ_PROMPTS_BACK = ("TORCH", "FLASH_ATTN_VLLM_FA3_EMULATED")  # though a step brings their keys
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


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_step_is_refused_with_what_was_forgotten(name: str) -> None:
    kit = type("Kit", (KitBase,), {"backend_name": name})()
    batch = kit.make_batch(kit.make_spec(), "mixed_small")
    layer, pool, common = make_layer(kit.backend, batch), batch.fresh_pool(), batch.common(0)
    for step, got in (
        (layer.builder.build(0, common), "a .*Metadata"),
        (common, "a Common.*"),
        (None, "None"),
        (3, "a int"),
    ):
        with pytest.raises(
            TypeError, match=rf"takes a \w+Step, and got {got}: build .* begin_forward before any layer"
        ):
            layer.impl.forward(batch.query, batch.key, batch.value, pool, step)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_whose_keys_are_in_the_cache_alone(name: str) -> None:
    """Some backends serve them although the step brings slots; others say what they lack, which is no cache."""
    kit = type("Kit", (KitBase,), {"backend_name": name})()
    batch = kit.make_batch(kit.make_spec(), BatchShape(seq_lens=(9, 5), query_lens=(9, 5)))
    layer, pool = make_layer(kit.backend, batch), batch.fresh_pool()
    written = layer.impl.forward(batch.query, batch.key, batch.value, pool, layer.begin(batch))
    if name in READ_PROMPTS_BACK:
        again = layer.impl.forward(batch.query, None, None, pool, layer.begin(batch))
        torch.testing.assert_close(again, written)
    else:
        with pytest.raises(
            ValueError, match=r"the keys that it brings, .* not given: pass key and value.* slot_mapping"
        ):
            layer.impl.forward(batch.query, None, None, pool, layer.begin(batch))
    with pytest.raises(ValueError, match=r"cache was not given: pass kv_cache|keys that it brings"):
        layer.impl.forward(batch.query, None, None, None, layer.begin(batch))


LAYERS, WHERE = {0: AttentionSpec(4, 4, 16)}, (KVCacheSpec(4, 16), Limits(2, 8, 32), "cpu")


def test_options_are_validated_ones() -> None:
    backend, group, raw = get_backend("TORCH"), plan_groups(LAYERS)[0], {"native_decode": False}
    for make in (
        lambda options: Plans(backend, LAYERS, *WHERE, options),
        lambda options: backend.get_builder_cls()(group, *WHERE, options=options),
        lambda options: backend.get_state_cls()([group], *WHERE, options=options),
        lambda options: backend.get_impl_cls()(group.spec, WHERE[0], "cpu", options=options),
    ):
        make(validate_options("TORCH", raw))
        with pytest.raises(
            TypeError, match=r"options is a dict; .* pass attn_backends.validate_options\(name, options"
        ):
            make(raw)


def test_layers_that_plans_do_not_have_are_named() -> None:
    plans, query = Plans(get_backend("TORCH"), LAYERS, *WHERE), torch.zeros(1, 4, 16)
    with pytest.raises(KeyError, match="no layer is named 5; these plans are of 0: bind one of them"):
        plans.bind(5)
    with pytest.raises(KeyError, match=r"layer 0 is not bound .* bound are none, .* of 0; call bind\(0, ...\)"):
        plans.forward(0, query, None, None, None, {0: None})  # type: ignore[dict-item]
    plans.bind(0)
    with pytest.raises(KeyError, match=r"layer 0 .* bound are 0, and the steps are of 1, 2, 3, 4, 5, …; .* what plan"):
        plans.forward(0, query, None, None, None, dict.fromkeys(range(1, 9)))  # type: ignore[arg-type]


def test_graphs_without_buffers_are_told_of_both_ways() -> None:
    plans, starts = Plans(get_backend("TORCH"), LAYERS, *WHERE), torch.arange(3, dtype=torch.int32)
    batch = CommonAttentionMetadata.from_tensors(
        16, starts, starts, starts[1:], None, torch.zeros(2, 1, dtype=torch.int32), torch.arange(2), for_graph=True
    )
    with pytest.raises(
        RuntimeError, match=r"held for 0 rows .* of 2: call state.hold_graph_buffers\(2\) .*graph_capture"
    ):
        plans.plan(batch)
    plans.state.hold_graph_buffers(2)
    plans.plan(batch)


@pytest.mark.parametrize("wants", ["query", "key", "value"])
@pytest.mark.parametrize("name", ["TORCH_MLA", "TORCH"])
def test_gradients_are_refused_and_the_cache_stays_without(name: str, wants: str) -> None:
    """TORCH has one of a query, in plain torch, and kernels in C give none; all others would be an error of torch's."""
    kit = type("Kit", (KitBase,), {"backend_name": name})()
    batch = kit.make_batch(kit.make_spec(), "mixed_small")
    in_c = {"native_decode": False, "native_prefill": False} if name == "TORCH" else {}
    layer, pool = make_layer(kit.backend, batch, options=validate_options(name, in_c)), batch.fresh_pool()
    given = {each: getattr(batch, each).clone() for each in ("query", "key", "value")}
    given[wants].requires_grad_()
    step = layer.begin(batch)
    if name == "TORCH_MLA" or wants != "query":
        with pytest.raises(
            ValueError, match=r"requires a gradient, .* inside torch.inference_mode\(\) or torch.no_grad"
        ):
            layer.impl.forward(*given.values(), pool, step)
    assert pool is not None
    assert not any(tensor.requires_grad for tensor in pool)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            layer.impl.forward(*given.values(), pool, step)
