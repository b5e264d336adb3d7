"""Trials of TRITON's decode tiles: which shapes are drawn, how tiles are spelt, and what the rule is held to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
decode_trials = pytest.importorskip("benchmarks.tune.decode_trials")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")


def test_shapes_are_those_that_were_asked_for() -> None:
    given = decode_trials.parse(
        ["--seed", "5", "--count", "12", "--dtypes", "fp8", "--most-pairs", "40", "--most-mb", "20"]
    )
    shapes = list(decode_trials.wanted(given))
    assert len(shapes) == 12
    assert len({each.id for each in shapes}) == 12
    for each in shapes:
        heads = each.shape.heads
        assert each.dtype == "fp8"
        assert len(each.shape.seq_lens) * heads[1] <= 40
        assert sum(each.shape.seq_lens) * 2 * heads[1] * heads[2] <= 20 << 20
        assert each.shape.query_len * heads[0] // heads[1] <= 48, "more queries than small tiles take"


@pytest.mark.parametrize("words", ["16,1", "16,1,6,4,128,7", "16,one,6,4,128,8"])
def test_what_is_no_tile_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_trials.parse(["--tiles", "16,1,6,4,128,8", words])
    assert f"{words!r} is no tile" in capsys.readouterr().err


def row(us: dict[str, float]) -> dict[str, Any]:
    sizes = {"heads": [8, 2, 128], "dtype": "bf16", "page": 16, "rows": 3, "query_len": 1}
    return {"shape": "a shape", "us": us, **sizes}


def test_the_rule_is_held_to_the_fastest_tile(capsys: pytest.CaptureFixture[str]) -> None:
    spec = decode_trials.spec_of([8, 2, 128], "bf16")
    tile = tuning.decode_tile(spec, None, 3, 16, None, decode_trials.SMEM_BYTES)
    of_rule, other = str(tuple(vars(tile).values())), "(64, 4, 6, 1, 128, 8)"
    decode_trials.judge([row({of_rule: 2.0, other: 1.0}), row({of_rule: 1.0, other: 2.0}), row({other: 1.0})])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"a shape: the rule's tile {of_rule} was not tried",
        "all: 2 shapes, 1.414, worst 2.000 (a shape)",
        "4+ pairs: 2 shapes, 1.414, worst 2.000 (a shape)",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="no CUDA device here"):
        decode_trials.main(["--count", "1", "--processes", "0"])
