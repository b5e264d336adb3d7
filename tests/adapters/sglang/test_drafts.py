"""What SGLang's runners of drafts ask of a backend beyond its steps: padded replays, and another model's pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attn_backends.adapters.sglang.steps import graph_rows
from attn_backends.interface.capabilities import Unsupported
from tests.helpers.sglang_engine import Engine, Kind, Shape


def test_replayed_drafts_come_without_their_padding() -> None:
    """Three rows of three tokens in a graph of four rows, whose tensors are those of the largest graph, of seven."""
    lens = torch.arange(10, 17)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="DRAFT_EXTEND_V2"), batch_size=4, input_ids=torch.zeros(9), seq_lens=lens,
        seq_lens_cpu=lens.clone(), req_pool_indices=torch.arange(7), spec_info=SimpleNamespace(num_tokens_per_req=3),
    )  # fmt: skip
    rows = graph_rows(batch, "TORCH", 64, 1)
    assert (rows.query_lens.tolist(), rows.num_tokens) == ([3] * 4, 12)
    assert rows.seq_lens.tolist() == rows.seq_lens_cpu.tolist() == [10, 11, 12, 13]
    assert rows.req_pool_indices.tolist() == [0, 1, 2, 3]


def test_a_draft_model_reads_the_pool_that_is_put_there() -> None:
    engine = Engine("TORCH", Shape(kinds=(Kind(), Kind(window=3))))
    own = engine.attention.token_to_kv_pool
    assert own is engine.pool
    assert engine.attention.req_to_token_pool is engine.runner.req_to_token_pool
    engine.run("EXTEND", [(0, 7), (1, 20)])
    target = engine._make_pool(own.get_kv_buffer(0)[0].shape[0] - engine.shape.page_size)
    for i in range(2):
        for there, here in zip(target.get_kv_buffer(i), own.get_kv_buffer(i), strict=True):
            there.copy_(here)
            here.fill_(torch.nan)
    engine.attention.token_to_kv_pool = target
    engine.run("DECODE", [(0, 1), (1, 1)])
    engine.attention.token_to_kv_pool = own
    assert engine.attention.token_to_kv_pool is own
    with pytest.raises(AssertionError, match="off by"):
        engine.run("DECODE", [(0, 1), (1, 1)])


def test_a_pool_with_other_slots_for_windowed_layers_is_refused() -> None:
    engine = Engine("TORCH", Shape(swa_pool=True))
    engine.attention.token_to_kv_pool = engine.pool  # its own
    with pytest.raises(Unsupported, match=r"token_to_kv_pool: got another SWA pool.*draft-attention-backend triton"):
        engine.attention.token_to_kv_pool = Engine("TORCH", Shape(swa_pool=True)).pool
