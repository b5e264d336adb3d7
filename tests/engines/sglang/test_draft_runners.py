"""SGLang's runners of drafts in CUDA graphs, by its attention kit, over our adapter: what they capture is recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import recorded_graphs
import test_kit
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner, frozen_kv_mtp_cuda_graph_runner
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.runner_modes import (
    speculative_draft_extend_runner as extend_kit,
    speculative_draft_runner as draft_kit,
)
from test_kit import CPU, NAME, each_speculative, one, speculative

_registered = test_kit._registered  # the fixture


@each_speculative
def test_drafts_over_the_targets_frozen_keys(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FROZEN_KV_MTP: one graph of several decode steps, which write nothing."""
    recorded_graphs.install(monkeypatch, frozen_kv_mtp_cuda_graph_runner)
    case = speculative(ForwardMode.DECODE, tokens=1, **how)
    draft_kit.run_dense_frozen_kv_mtp_cuda_graph_runner_case(one(), case, **CPU)


@each_speculative
@pytest.mark.parametrize("graph_rows", [4, 7])
def test_draft_extend(how: dict[str, Any], graph_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes no backend of ours for EAGLE's drafts: it is put there."""
    recorded_graphs.install(monkeypatch, eagle_draft_extend_cuda_graph_runner)
    in_turn = partial(extend_kit.build_dense_attention_fixture, loc_layout="contiguous")
    monkeypatch.setattr(extend_kit, "build_dense_attention_fixture", in_turn)  # the kit writes prefixes there
    make = ATTENTION_BACKENDS[NAME]
    monkeypatch.setattr(DraftBackendFactory, "create_draft_extend_backend", lambda self: make(self.draft_model_runner))
    case = speculative(ForwardMode.DRAFT_EXTEND_V2, **how)
    extend_kit.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case(
        one(), case, cuda_graph_capture_batch_size=graph_rows, **CPU
    )


@pytest.mark.parametrize(
    ("run", "mode"),
    [
        (draft_kit.run_dense_eagle_draft_cuda_graph_runner_case, ForwardMode.DECODE),
        (extend_kit.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case, ForwardMode.DRAFT_EXTEND_V2),
    ],
    ids=["draft", "draft_extend"],
)
def test_sglang_knows_no_name_of_ours_for_eagles_drafts(run: Any, mode: ForwardMode) -> None:
    """Its list is closed: where this fails, it has been opened, and the adapter may serve them."""
    case = speculative(mode, tokens=1 if mode.is_decode() else 3)
    with pytest.raises(ValueError, match=f"EAGLE is not supported in (decode )?attention backend {NAME}"):
        run(one(), case, **CPU)
