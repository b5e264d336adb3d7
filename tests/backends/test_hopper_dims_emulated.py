"""TRITON's prefill kernel for Hopper on a CPU, at head dims that are no power of two: random layers, wherever keys lie.

Seeds of SHOWN were there when the kernel was written; those of UNSEEN judge it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.spec import Layout
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Result, assert_matches, make_layer
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted
from tests.helpers.mutate import copied_module
from tests.helpers.placed_caches import PLACES, placed

launch = pytest.importorskip("attn_backends.kernels.prefill.launch", reason="needs triton")

DIMS = tuple(dims for dims in launch.HOPPER_DIMS if dims not in ((64, 64), (128, 128), (192, 128), (256, 256)))
SHOWN, UNSEEN = range(3), range(1000, 1003)


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from attn_backends.kernels.prefill import hopper_kernel
    from tests.helpers.gluon_emulator import Emulated

    made: list[int] = []
    monkeypatch.setattr(launch, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr("attn_backends.backends.triton.metadata.short_tile", lambda *_: None)
    emulated = Emulated(hopper_kernel.prefill_hopper_kernel, made.append)
    monkeypatch.setattr(hopper_kernel, "prefill_hopper_kernel", emulated)
    return made


@dataclass(frozen=True)
class Drawn:
    spec: AttentionSpec
    seq_lens: list[int]
    query_lens: list[int]
    page_size: int
    layout: Layout
    place: str

    def batch(self, seed: int) -> Batch:
        given: dict[str, Any] = {"page_size": self.page_size, "layout": self.layout, "poison": float("nan")}
        return random_batch(get_backend("TRITON"), self.spec, self.seq_lens, self.query_lens, seed=seed, **given)


def draw(dims: tuple[int, int], seed: int) -> Drawn:
    """A layer, rows of chunks or of whole prompts, and where its keys lie."""
    dice = Random(f"{dims} {seed}")
    seen: dict[str, Any] = dice.choice(
        [{}, {"window_left": dice.randrange(200)}, {"chunk_size": dice.randrange(20, 300)}, {"causal": False},
         {"causal": False, "window_left": dice.randrange(200)}]
    )  # fmt: skip
    group, num_kv_heads, num_rows = dice.choice((1, 2, 3, 5, 8)), dice.choice((1, 2, 3)), dice.randint(1, 3)
    spec = AttentionSpec(
        group * num_kv_heads, num_kv_heads, dims[0], head_dim_vo=dims[1], sinks=dice.random() < 0.3,
        dtype=dice.choice((torch.float16, torch.bfloat16)), **seen,
    )  # fmt: skip
    query_lens = sorted(dice.randint(17, 140) for _ in range(num_rows))
    are_prompts = dice.random() < 0.3
    seq_lens = [length + (0 if are_prompts else dice.randrange(200)) for length in query_lens]
    page_size = dice.choice((16, 32, 48, 64, 128, 256))
    layout: Layout = dice.choice(("NHD", "HND"))
    return Drawn(spec, seq_lens, query_lens, page_size, layout, dice.choice(PLACES))


def check(drawn: Drawn, seed: int, launches: list[int]) -> None:
    batch = drawn.batch(seed)
    layer, expected = make_layer(get_backend("TRITON"), batch), batch.expected()
    step, pool = layer.begin(batch), batch.fresh_pool()
    assert pool is not None
    cache = placed(pool, drawn.place)
    assert_matches(layer.forward(batch, step, want_lse=True, kv_cache=cache), batch, str(drawn), expected)
    # Behind these queries no memory is anybody's.
    output = layer.impl.forward(batch.query.clone(), batch.key, batch.value, cache, step)
    assert_matches(Result(output, None, cache), batch, str(drawn), expected)
    assert len(launches) == 2


@only_interpreted
@pytest.mark.parametrize("seed", [*SHOWN, *UNSEEN])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_random_layers(dims: tuple[int, int], seed: int, launches: list[int]) -> None:
    check(draw(dims, seed), seed, launches)


@only_interpreted
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("place", PLACES)
def test_places(place: str, layout: Layout, launches: list[int]) -> None:
    """NaN behind each head's columns is not read; nor are other heads' columns added."""
    for dims in DIMS:
        launches.clear()
        spec = AttentionSpec(6, 3, dims[0], head_dim_vo=dims[1], dtype=torch.float16)
        check(Drawn(spec, [150, 70], [40, 33], 16, layout, place), 0, launches)


FAULTS = {
    "columns that come twice": (80, "at_head, column_tile * TMA_COLS]", "at_head, column_tile * 0]"),
    "keys of the first head": (80, "at = [row, at_head, column_tile", "at = [row, at_head * 0, column_tile"),
    "queries behind the last head": (80, "if (column_tile + 1) * TMA_COLS > DIM:", "if False:"),
    "queries that are not multiplied": (112, "for i in gl.static_range(num_pieces(DIM)):",
                                        "for i in gl.static_range(num_pieces(DIM) - 1):"),
    "values of the first part twice": (192, "STAGES * (WIDE // TMA_COLS) + stage", "stage"),
    "values of the other stage": (96, "else STAGES * TOGETHER + stage", "else STAGES * TOGETHER"),
    "output in the next head's columns": (112, "query_len, smem, DIM_VO)", "query_len, smem, WIDE)"),
    "weights that are not scaled": (192, "scaled + (times_rows(acc[i], row_factors),)", "scaled + (acc[i],)"),
    "one product that is waited for": (192, "warpgroup_mma_wait(num_accs(DIM_VO), deps=(pending,))",
                                       "warpgroup_mma_wait(num_accs(DIM_VO) + 1, deps=(pending,))"),
    "NaN behind the last value": (192, "for i in gl.static_range(num_accs(DIM_VO)):\n        clear_rows(",
                                  "for i in gl.static_range(1):\n        clear_rows("),
}  # fmt: skip


@only_interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, launches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.kernels.prefill import hopper_kernel
    from tests.helpers.gluon_emulator import Emulated

    dim, old, new = FAULTS[fault]
    wrong = copied_module(hopper_kernel, tmp_path, (old, new))
    monkeypatch.setattr(hopper_kernel, "prefill_hopper_kernel", Emulated(wrong.prefill_hopper_kernel, launches.append))
    layer = AttentionSpec(6, 3, dim, dtype=torch.float16)
    with pytest.raises((AssertionError, RuntimeError, IndexError, AttributeError)):  # the last of products under way
        check(Drawn(layer, [150, 270], [40, 233], 16, "NHD", "apart"), 0, launches)
