"""Parameters of layers: taken from specs whole, inferred where all share them, and told apart where they do not."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings, strategies as st

from attn_backends.batch.layer_parameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from attn_backends.spec import AttentionSpec, AttentionType, plan_groups

FULL = AttentionSpec(4, 2, 8)
SPECS = st.builds(
    AttentionSpec,
    st.just(4),
    st.sampled_from([1, 2]),
    st.just(8),
    window_left=st.sampled_from([-1, 3]),
    logits_soft_cap=st.sampled_from([None, 5.0]),
    sinks=st.booleans(),
)
CHANGES = {
    "window_left": {"window_left": 127},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "scale": {"scale": 0.5},
    "has_sinks": {"sinks": True},
    "alibi_slopes": {"alibi_slopes": (1.0, 0.5, 0.25, 0.125)},
    "pos_encoding_mode": {"pos_encoding_mode": "ROPE_LLAMA"},
    "chunk_size": {"chunk_size": 64},
    "causal": {"causal": False},
    "attention_type": {"attention_type": AttentionType.ENCODER, "causal": False},
}


def test_every_field_of_a_spec_is_a_parameter_or_a_shape() -> None:
    """A field that is added to the spec has to be put on one side; dropped in silence, layers would share a plan."""
    shapes = {"num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo", "dtype", "cache_dtype"}
    parameters = {field.name for field in fields(PerLayerParameters)}
    assert {field.name for field in fields(AttentionSpec)} - shapes == parameters - {"has_sinks"} | {"sinks"}
    assert set(CHANGES) == parameters - {"rope_scale", "rope_theta"}  # of layers that rotate alone


@given(st.dictionaries(st.text(max_size=3), SPECS, max_size=6))
@settings(deadline=None)
def test_parameters_are_the_specs(specs: dict[str, AttentionSpec]) -> None:
    params = get_per_layer_parameters(specs)
    assert list(params) == list(specs)
    for layer, spec in specs.items():
        for field in fields(PerLayerParameters):
            expected = getattr(spec, field.name.removeprefix("has_"))
            assert getattr(params[layer], field.name) == expected


@given(st.dictionaries(st.integers(0, 99), SPECS, min_size=1, max_size=6))
@settings(deadline=None)
def test_global_parameters_are_those_of_every_layer_or_an_error(specs: dict[int, AttentionSpec]) -> None:
    params = get_per_layer_parameters(specs)
    if len(set(params.values())) == 1:
        assert {infer_global_hyperparameters(params)} == set(params.values())
    else:
        with pytest.raises(ValueError, match="Plan groups lift this rule"):
            infer_global_hyperparameters(params)
    for group in plan_groups(specs):  # the rule holds in each plan group
        infer_global_hyperparameters({layer: params[layer] for layer in group.layers})


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_differs_is_named(name: str) -> None:
    other = replace(FULL, **CHANGES[name])  # type: ignore[arg-type]
    params = get_per_layer_parameters({0: FULL, 1: other, 2: FULL})
    theirs, its = getattr(params[0], name), getattr(params[1], name)
    told = re.escape(f"{name} is {theirs} in layers 0, 2; {its} in layer 1")
    with pytest.raises(ValueError, match=told + r".*plan_groups\(specs\)"):
        infer_global_hyperparameters(params)


def test_shapes_may_differ_and_long_lists_are_cut() -> None:
    wide = replace(FULL, num_kv_heads=4)
    assert infer_global_hyperparameters(get_per_layer_parameters({0: FULL, 1: wide})).scale == FULL.scale
    specs: dict[object, AttentionSpec] = {**dict.fromkeys(range(30), FULL), "last": replace(FULL, window_left=7)}
    with pytest.raises(ValueError, match="-1 in layers 0, 1, 2, 3, 4, 5, 6, 7 and 22 more; 7 in layer last"):
        infer_global_hyperparameters(get_per_layer_parameters(specs))
    eight: dict[object, AttentionSpec] = {**dict.fromkeys(range(8), FULL), "last": replace(FULL, window_left=7)}
    with pytest.raises(ValueError, match="-1 in layers 0, 1, 2, 3, 4, 5, 6, 7; 7 in layer last"):
        infer_global_hyperparameters(get_per_layer_parameters(eight))
    with pytest.raises(ValueError, match="no layers"):
        infer_global_hyperparameters({})
