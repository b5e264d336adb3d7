"""Specs resolve their defaults, refuse what has no meaning, and group layers."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, MLASpec, new_kv_shapes, plan_groups


def test_defaults_are_resolved() -> None:
    spec = AttentionSpec(8, 2, 64, dtype=torch.bfloat16)
    assert (spec.head_dim_vo, spec.scale, spec.cache_dtype) == (64, 64**-0.5, torch.bfloat16)
    assert spec.group_size == 4
    assert spec == AttentionSpec(8, 2, 64, 64, 0.125, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    assert hash(spec) == hash(replace(spec))
    with pytest.raises(FrozenInstanceError):
        spec.scale = 1.0  # type: ignore[misc]


def test_mla_layers_are_expanded_ones_with_latent_rows() -> None:
    spec = MLASpec(128)
    assert (spec.num_kv_heads, spec.head_dim, spec.head_dim_vo, spec.scale) == (128, 192, 128, 192**-0.5)
    assert (spec.qk_nope_head_dim, spec.latent_dim, new_kv_shapes(spec)) == (128, 576, ((512,), (64,)))
    assert replace(spec, scale=0.5, num_qo_heads=16, num_kv_heads=16) == MLASpec(16, scale=0.5)
    assert spec != AttentionSpec(128, 128, 192, 128)
    assert len(plan_groups({0: spec, 1: MLASpec(128, kv_lora_rank=256), 2: MLASpec(128)})) == 2
    for changes, message in (
        ({"num_kv_heads": 1}, "num_kv_heads is 1 for 128 query heads"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"kv_lora_rank": 512.0}, "kv_lora_rank is 512.0; it must be a whole number"),
        ({"qk_rope_head_dim": 192}, "qk_rope_head_dim 192 of head_dim 192"),
    ):
        with pytest.raises(ValueError, match=message):
            MLASpec(128, **changes)


def test_values_are_normalised() -> None:
    spec = AttentionSpec(2, 1, 4, scale=1, alibi_slopes=[1, 2], attention_type="encoder", causal=False)  # type: ignore[arg-type]
    assert spec.alibi_slopes == (1.0, 2.0)
    assert spec.attention_type is AttentionType.ENCODER
    assert isinstance(spec.scale, float)
    counted = AttentionSpec(np.int64(8), 2, np.int32(64), chunk_size=np.int64(4))  # type: ignore[arg-type]
    assert all(type(number) is int for number in (counted.num_qo_heads, counted.head_dim, counted.chunk_size))
    assert counted == AttentionSpec(8, 2, 64, chunk_size=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"num_qo_heads \(8\) must be a multiple of num_kv_heads \(3\)"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be at least 1"),
        ({"head_dim": 0, "scale": 1.0}, "head_dim is 0"),
        ({"head_dim_vo": -1}, "head_dim_vo is -1"),
        ({"window_left": -2}, "window_left is -2; use -1 for no window"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0; use None"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap is inf; use None for no cap, or a positive number"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap is nan"),
        ({"alibi_slopes": (1.0,) * 7 + (math.nan,)}, "alibi_slopes is nan; use None .* or a finite number"),
        ({"alibi_slopes": (1.0,) * 7 + (-math.inf,)}, "alibi_slopes is -inf"),
        ({"scale": math.nan}, "scale is nan"),
        ({"head_dim": 64.0}, "head_dim is 64.0; it must be a whole number"),
        ({"head_dim_vo": torch.tensor(64.0)}, r"head_dim_vo is tensor\(64.\); it must be a whole number"),
        ({"num_qo_heads": "8"}, "num_qo_heads is '8'"),
        ({"window_left": None}, "window_left is None; it must be a whole number"),
        ({"chunk_size": 4.0}, "chunk_size is 4.0"),
        ({"alibi_slopes": (1.0,)}, "alibi_slopes has 1 values for 8 query heads"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 4, "window_left": 3}, "excludes window_left"),
        ({"attention_type": AttentionType.ENCODER}, "encoder attention sees every key: pass causal=False"),
        ({"attention_type": AttentionType.CROSS}, "encoder_decoder attention sees every key: pass causal=False"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, **changes})


def test_cache_spec_and_limits() -> None:
    assert KVCacheSpec(10, 16).num_slots == 160
    with pytest.raises(ValueError, match=r"num_pages \(0\) and page_size \(16\) must be at least 1"):
        KVCacheSpec(0)
    with pytest.raises(ValueError, match="layout is 'DHN'; allowed: 'NHD', 'HND'"):
        KVCacheSpec(1, layout="DHN")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_num_tokens is 0; it must be at least 1"):
        Limits(1, 0, 1)
    for made, told in (
        (lambda: KVCacheSpec(10.5), "num_pages is 10.5"),  # type: ignore[arg-type]
        (lambda: KVCacheSpec(1, 16.0), "page_size is 16.0"),  # type: ignore[arg-type]
        (lambda: Limits(1, 1, 1e3), "max_model_len is 1000.0"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=f"{told}; it must be a whole number"):
            made()


SPECS = st.builds(
    AttentionSpec,
    st.just(4),
    st.sampled_from([1, 2]),
    st.just(8),
    window_left=st.sampled_from([-1, 3]),
    logits_soft_cap=st.sampled_from([None, 5.0]),
    sinks=st.booleans(),
)


@given(st.dictionaries(st.text(max_size=3), SPECS, max_size=8))
@settings(deadline=None)
def test_plan_groups_are_a_partition_by_equal_specs(specs: dict[str, AttentionSpec]) -> None:
    groups = plan_groups(specs)
    assert [group.index for group in groups] == list(range(len(groups)))
    assert sorted(layer for group in groups for layer in group.layers) == sorted(specs)
    assert all(specs[layer] == group.spec for group in groups for layer in group.layers)
    assert len({group.spec for group in groups}) == len(groups)
    firsts = [list(specs).index(group.layers[0]) for group in groups]
    assert firsts == sorted(firsts)
    assert all(list(group.layers) == [layer for layer in specs if layer in group.layers] for group in groups)
