"""Prefill on Hopper where shared memory holds one tile of queries, on a CPU: the next ones come behind the last logits,
and results go past their place. Faults are found."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module

launch = pytest.importorskip("attn_backends.kernels.prefill.launch", reason="needs triton")

LENS = [250, 131, 70, 300, 90], [20, 131, 33, 140, 90]  # tiles of one group of warps, of two, and of several blocks
REST = "tensors, strides, warp_group, GROUP, DIM"
COPY = f"    _prefetch_queries(q, nth % Q_STAGES, tile_info, {REST}, SPLIT_HEADS)"
NEXT = f"""        next_tile_info = _next_tile(q, tile_channel, num_tiles, {REST},
                                    Q_STAGES, SPLIT_HEADS)  # fmt: skip
"""
NEXT_OF_NONE = "\n".join("    " + line for line in NEXT.splitlines()) + "\n"
FAULTS = {
    "they come in front of the last logits": [
        (f"{NEXT}        p, acc", "        p, acc"),
        ("        q_read = q._reinter", f"{NEXT}        q_read = q._reinter"),
    ],
    "nobody asks for them": [(f"{COPY}\n    return", "    return")],
    "nobody asks for a group's that has none now": [
        (f"_let_pass(kv_pipeline, done, tile_info[3], TURN)\n{NEXT_OF_NONE}",
         "_let_pass(kv_pipeline, done, tile_info[3], TURN)\n            "
         "next_tile_info, _none = _consume(tile_channel, num_tiles, 0)\n"),
    ],
    "results go by their place": [
        ("    if Q_STAGES == 1 and acc_width(DIM_VO, 0) == DIM_VO:", "    if Q_STAGES == 3:"),
        ("    elif Q_STAGES > 1 and column_tiles(DIM)", "    elif column_tiles(DIM)"),
    ],
}  # fmt: skip


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


@only_interpreted
@pytest.mark.parametrize("fault", ["none", *FAULTS])
@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
def test_faults_are_found(dims: tuple[int, int], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.backends.triton.plans import TilePlan
    from attn_backends.kernels.prefill import hopper_kernel
    from attn_backends.kernels.prefill.tiles import hopper_tiles
    from tests.helpers.gluon_emulator import Emulated

    if fault == "results go by their place" and dims[0] != dims[1]:
        pytest.skip("it is not as wide as they are")
    assert hopper_tiles(*dims)[0].q_stages == 1
    monkeypatch.setattr(launch, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr("attn_backends.backends.triton.metadata.short_tile", lambda *_: None)
    monkeypatch.setattr("attn_backends.backends.triton.metadata.prefill_plan", lambda *_, **__: TilePlan(None, None))
    changed = copied_module(hopper_kernel, tmp_path, *FAULTS.get(fault, []))
    monkeypatch.setattr(hopper_kernel, "prefill_hopper_kernel", Emulated(changed.prefill_hopper_kernel, lambda _: None))
    spec = AttentionSpec(4, 2, dims[0], head_dim_vo=dims[1], dtype=torch.float16)
    batch = random_batch(get_backend("TRITON"), spec, *LENS, page_size=16, poison=float("nan"))
    layer, expected = make_layer(get_backend("TRITON"), batch), batch.expected()
    step = layer.begin(batch)
    with nullcontext() if fault == "none" else pytest.raises(AssertionError):
        for nth in range(3):
            assert_matches(layer.forward(batch, step, want_lse=nth % 2 == 1), batch, fault, expected)
