"""SGLang's own attention kit (`sglang.test.kits.attention_unittest`) over our adapter: all of its dense and SWA cases,
and the refusal of its latent ones. `test_draft_runners` has its runners of drafts.

The kit's model has no layers when a backend is made, and a real one has: they are put there first.
"""

from __future__ import annotations

import unittest
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sglang.test.kits.attention_unittest.attention_methods.dense_attention as kit
import sglang.test.kits.attention_unittest.attention_methods.mla_attention as mla_kit
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.runner_modes import (
    cuda_graph_decode_runner,
    speculative_draft_extend_runner,
    speculative_target_verify_runner,
    split_op_runner,
)

from attn_backends.adapters.sglang import plugin
from attn_backends.interface.capabilities import Unsupported

NAME = "attn_backends_torch"
CPU = {"dtype": torch.float32, "device": "cpu"}
EAGER = (
    *kit.make_dense_cases(NAME),
    *kit.make_swa_no_prefix_input_config_cases(NAME),
    *kit.make_swa_prefix_input_config_cases(NAME),
)
DECODES = [case for case in EAGER if case.forward_mode.is_decode()]
EXTENDS = [case for case in EAGER if not case.forward_mode.is_decode()]


def speculative(mode: ForwardMode, **how: Any) -> kit.DenseAttentionCase:
    prefix_lens, tokens = how.pop("prefix_lens", (14, 15, 16)), how.pop("tokens", 3)
    return kit.DenseAttentionCase(
        name=f"{mode.name.lower()}_{prefix_lens}_{how}", backend=NAME, forward_mode=mode, num_heads=4, num_kv_heads=2,
        page_size=how.pop("page_size", 16), prefix_lens=prefix_lens, extend_lens=(tokens,) * len(prefix_lens), **how,
    )  # fmt: skip


SPECULATIVE = [{}, {"page_size": 1}, {"prefix_lens": (7,)}, {"sliding_window_size": 4}, {"prefix_lens": (3, 4, 5)}]
each_speculative = pytest.mark.parametrize("how", SPECULATIVE, ids=str)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """By the plugin's own `register`, with the model's layers put where a real model has them."""
    monkeypatch.setattr(kit, "_SWA_DECODE_EXTEND_WINDOW", kit._SWA_DECODE_EXTEND_WINDOW | {NAME})
    plugin.register()
    monkeypatch.setitem(ATTENTION_BACKENDS, NAME, partial(_with_layers, ATTENTION_BACKENDS[NAME]))
    with torch.no_grad():
        yield


def _with_layers(make: Any, runner: Any) -> Any:
    config = runner.model_config
    runner.model = torch.nn.Module()  # 0.5.14's has none
    window = config.sliding_window_size
    runner.model.attn = RadixAttention(
        config.num_attention_heads, config.head_dim, config.head_dim**-0.5, config.num_key_value_heads, 0,
        sliding_window_size=-1 if window is None else window,
    )  # fmt: skip
    return make(runner)


def one() -> unittest.TestCase:
    return unittest.TestCase()


@pytest.mark.parametrize("case", EAGER, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", ["contiguous", "shuffled_pages", "interleaved_pages"])
def test_dense(case: Any, layout: str) -> None:
    kit.run_dense_attention_case(one(), case, loc_layout=layout, **CPU)


@pytest.mark.parametrize("case", [case for case in EAGER if case.page_size == 1], ids=lambda case: case.name)
def test_slots_in_any_order(case: Any) -> None:
    """Which pages of several tokens have not."""
    kit.run_dense_attention_case(one(), case, loc_layout="non_monotonic_extend", **CPU)


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_decode_graphs(case: Any) -> None:
    cuda_graph_decode_runner.run_dense_cuda_graph_decode_case(one(), case, **CPU)


@pytest.mark.parametrize("case", EXTENDS, ids=lambda case: case.name)
@pytest.mark.parametrize("breakable", [False, True])
def test_split_op(case: Any, breakable: bool) -> None:
    """Prompts in piecewise graphs, whose attention runs eager over padded tokens."""
    run, tokens = split_op_runner.run_dense_split_op_extend_case, case.num_input_tokens + 3
    if hasattr(torch.ops.sglang, "unified_attention_with_output"):  # newer ones call a function
        pytest.skip("this version has the operator that splits graphs on CUDA alone")
    run(one(), case, breakable=breakable, static_num_tokens=tokens, **CPU)


@each_speculative
@pytest.mark.parametrize("kind", ["eagle", "frozen_kv_mtp", "dflash", "ngram"])
def test_verify(how: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs over slots in turn: the kit writes prefixes there, whatever its table says."""
    case = speculative(ForwardMode.TARGET_VERIFY, **how)
    runner = speculative_target_verify_runner
    runner.run_dense_spec_verify_case(one(), case, topk=1, spec_kind=kind, **CPU)
    in_turn = partial(kit.build_dense_attention_fixture, loc_layout="contiguous")
    monkeypatch.setattr(runner, "build_dense_attention_fixture", in_turn)
    runner.run_dense_spec_verify_cuda_graph_case(one(), case, topk=1, spec_kind=kind, **CPU)


def test_a_tree_of_drafts_is_refused() -> None:
    case = speculative(ForwardMode.TARGET_VERIFY)
    with pytest.raises(Unsupported, match=r"a tree of drafts, topk 2.*speculative-eagle-topk 1"):
        speculative_target_verify_runner.run_dense_eagle_verify_case(one(), case, topk=2, **CPU)


@each_speculative
@pytest.mark.parametrize("pad_style", ["small_real", "prod_fill"])
def test_draft_extend(how: dict[str, Any], pad_style: str) -> None:
    case = speculative(ForwardMode.DRAFT_EXTEND_V2, **how)
    run = speculative_draft_extend_runner.run_dense_draft_extend_v2_cuda_graph_case
    run(one(), case, pad_style=pad_style, **CPU)


def test_latent_attention_is_refused() -> None:
    for case in mla_kit.make_mla_cases(NAME):
        with pytest.raises(Unsupported, match="mla: got a model with latent attention"):
            mla_kit.run_mla_attention_case(one(), case, **CPU)


def test_the_kit_notices() -> None:
    """A window that is one key too long is seen by it."""
    (case,) = kit.make_swa_prefix_input_config_cases(NAME)
    make = ATTENTION_BACKENDS[NAME]

    def wider(runner: Any) -> Any:
        runner.model_config.sliding_window_size += 1
        return make(runner)

    ATTENTION_BACKENDS[NAME] = wider
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        kit.run_dense_attention_case(one(), replace(case), **CPU)
