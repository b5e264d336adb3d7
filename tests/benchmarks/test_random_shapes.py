"""Shapes drawn at random: what is drawn, what is measured at them, and what the report makes of it."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from benchmarks.attention import (
    attention,
    bare_kernels,
    random_measure,
    random_plot,
    random_results,
    random_shapes,
    random_statistics,
    sampled_problem,
    shape_draws,
)
from benchmarks.attention.contest import checked
from benchmarks.attention.paged_problem import Shape, make_contender
from benchmarks.attention.random_report import report_of
from benchmarks.attention.sampled_problem import Pool
from benchmarks.attention.shape_draws import HEAD_DIMS, JUDGING, KINDS, ON_CPU, ON_GPU, TUNING, draw, drawn
from benchmarks.lib import processes
from benchmarks.lib.processes import Failed
from tests.helpers.forked import run_python
from tests.helpers.quick_native import quick_native

CPU = torch.device("cpu")
MANY = [draw(1000, index) for index in range(3000)]


@pytest.mark.parametrize("module", [shape_draws, random_statistics, importlib.import_module(Shape.__module__)])
def test_examples_in_docstrings_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


class TestDraws:
    @pytest.mark.parametrize(("of", "weights"), [
        (lambda each: each.kind, KINDS), (lambda each: each.shape.heads[2], HEAD_DIMS),
        (lambda each: each.dtype, shape_draws.DTYPES), (lambda each: each.page_size, shape_draws.PAGE_SIZES),
    ])  # fmt: skip
    def test_shares_are_what_they_say(self, of: Any, weights: dict[Any, float]) -> None:
        assert sum(weights.values()) == pytest.approx(1)
        found = Counter(map(of, MANY))
        assert {name: found[name] / len(MANY) for name in weights} == pytest.approx(weights, abs=0.03)

    def test_heads_span_what_was_asked(self) -> None:
        heads = [each.shape.heads for each in MANY]
        assert {qo // kv for qo, kv, _ in heads} == set(range(1, 17))
        assert {kv for _, kv, _ in heads} >= {1, 2, 3, 4, 5, 8, 16, 32, 64}
        assert all(qo % kv == 0 for qo, kv, _ in heads)
        published = [each for each in MANY if each.source != "no model"]
        assert len(published) / len(MANY) == pytest.approx(1 - shape_draws.FREE_HEADS, abs=0.03)
        assert sum(", 1/" in each.source for each in published) > 0.3 * len(published)

    def test_sizes_span_what_was_asked(self) -> None:
        decodes = [each.shape for each in MANY if each.kind == "decode"]
        counts, longest = (
            [f(shape) for shape in decodes] for f in (lambda s: len(s.seq_lens), lambda s: max(s.seq_lens))
        )
        assert min(counts) == 1
        assert max(counts) > 400
        assert min(longest) < 20
        assert max(longest) > 100_000
        assert Counter(len(set(shape.seq_lens)) == 1 for shape in decodes)[False] > 0.5 * len(decodes)
        verified = {each.shape.query_len for each in MANY if each.kind == "verify"}
        assert verified == set(range(2, 17))

    def test_each_kind_is_what_it_says(self) -> None:
        for each in MANY:
            shape, kind = each.shape, each.kind
            assert (shape.window_left >= 0) == (kind == "windows")
            assert bool(shape.decodes) == (kind == "mixed")
            assert (shape.query_len > 1) == (kind == "verify")
            assert shape.is_prefill or kind in ("decode", "verify", "windows")
            assert kind not in ("prompts", "chunks") or shape.all_are_new == (kind == "prompts")
            assert len(shape.query_lens) == len(shape.seq_lens)
            assert all(0 < new <= keys for new, keys in zip(shape.query_lens, shape.seq_lens, strict=True))

    def test_one_problem_fits_memory_and_time(self) -> None:
        for each in MANY:
            per_slot = 2 * each.shape.heads[1] * each.shape.heads[2] * (1 if each.dtype == "fp8" else 2)
            slots = sum(-(-keys // 256) * 256 for keys in each.shape.seq_lens)
            assert slots * per_slot <= ON_GPU.num_bytes
            assert each.shape.flops <= ON_GPU.flops

    def test_a_number_is_the_same_shape_everywhere(self) -> None:
        """These were drawn elsewhere, by another process; Python's own hashes differ from process to process."""
        first = [draw(1000, index) for index in range(3)]
        assert [(each.kind, each.source, each.shape.heads, sum(each.shape.seq_lens)) for each in first] == EXPECTED

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 1999), st.integers(0, 10_000))
    def test_a_number_is_drawn_alone(self, seed: int, index: int) -> None:
        assert draw(seed, index, ON_CPU) == draw(seed, index, ON_CPU)

    def test_kinds_leave_numbers_as_they_are(self) -> None:
        some = list(drawn(1000, 20, ["verify", "mixed"]))
        assert len(some) == 20
        assert some == [each for each in MANY if each.kind in ("verify", "mixed")][:20]

    def test_seeds_for_tuning_judge_nothing(self) -> None:
        assert not set(TUNING) & set(JUDGING)
        with pytest.raises(ValueError, match="give one of 0 to 999 to tune by, or of 1000 to 1999 to judge by"):
            draw(2000, 0)
        assert draw(999, 0).shape != draw(1000, 0).shape


class TestSampledAnswers:
    shape = Shape((40, 300, 7, 90) * 5, (8, 4, 16))

    def problem(self, shape: Shape = shape) -> sampled_problem.SampledProblem:
        return sampled_problem.sampled_problem(shape, torch.float32, 16, Pool(8 << 20, CPU), "a seed")

    def test_are_parts_of_the_whole_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of prompts, chunks and decodes alike, and from pages of another size too."""
        monkeypatch.setattr(sampled_problem, "MOST_ELEMENTS", 300 * 16)  # one KV head of the longest request
        prompts, heads = replace(self.shape, is_prefill=True), set()
        for shape in (self.shape, prompts, replace(prompts, chunk_lens=(5, 290, 1, 90) * 5), replace(
                prompts, window_left=9), replace(self.shape, query_len=3)):  # fmt: skip
            for problem in (self.problem(shape), self.problem(shape).repaged(256)):
                for answer in problem.answers:
                    whole = problem._expected(problem.queries[answer.copy], problem.caches[answer.copy])
                    torch.testing.assert_close(answer.values, whole[answer.tokens, answer.heads])
                    heads.add((answer.heads.start, answer.heads.stop))
        assert len(heads) >= 4, "not all heads of each"

    def test_are_of_the_longest_and_the_shortest_among_others(self) -> None:
        problem = self.problem()
        seen = {(answer.copy, self.shape.seq_lens[answer.tokens.start]) for answer in problem.answers}
        assert seen >= {(0, 300), (0, 7), (1, 300), (1, 7)}
        assert len(problem.answers) <= 2 * sampled_problem.MOST_REQUESTS

    def test_a_wrong_row_is_seen(self) -> None:
        problem = self.problem()
        whole = [problem._expected(*each).float() for each in zip(problem.queries, problem.caches, strict=True)]
        contender = make_contender(problem, lambda i: problem.outputs[i].copy_(whole[i]))
        assert contender.check() < 1e-5
        whole[1][problem.answers[-1].tokens] *= 1.1
        with pytest.raises(ValueError, match=r"relative error 0\.1 against float64"):
            contender.check()
        whole[1].fill_(torch.nan)
        with pytest.raises(ValueError, match="wrong output: relative error nan"):
            contender.check()

    def test_copies_share_no_memory(self) -> None:
        pool = Pool(8 << 20, CPU)
        problem = sampled_problem.sampled_problem(self.shape, torch.float32, 16, pool, "a", num_copies=2)
        used = [cached.flatten() for cache in problem.caches for cached in cache]
        ends = sorted((cached.data_ptr(), cached.data_ptr() + 4 * len(cached)) for cached in used)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        again = sampled_problem.sampled_problem(self.shape, torch.float32, 16, pool, "a", num_copies=2)
        assert again.caches[0].key.data_ptr() == problem.caches[0].key.data_ptr(), "the pool is cut anew"
        with pytest.raises(ValueError, match="do not fit into a pool"):
            sampled_problem.sampled_problem(self.shape, torch.float32, 16, pool, "a", num_copies=20)


class TestChunks:
    shape = Shape((40, 300, 90), (8, 4, 16), is_prefill=True, decodes=1, chunk_lens=(4, 90))

    def test_have_new_tokens_behind_cached_ones(self) -> None:
        assert self.shape.query_lens == (1, 4, 90)
        assert not self.shape.all_are_new
        assert self.shape.name == "1 x 40 + 1 x 300 + 1 x 90, 8/4, 16, 1 decodes and prefill of the last 1 x 4 + 1 x 90"
        pairs = 40 + (4 * 300 - 8) + 90 * 90 / 2
        assert self.shape.flops == 4 * 8 * 16 * pairs

    def test_kernels_over_new_keys_alone_are_no_contenders(self, flashinfer: None) -> None:
        """Prompts whose beginning is cached have keys that are not new."""
        chunks = replace(self.shape, decodes=0, chunk_lens=(3, 4, 90))
        for shape, ragged in (
            (self.shape, False),
            (chunks, False),
            (Shape((30, 20), (8, 4, 64), is_prefill=True), True),
        ):
            shape = replace(shape, heads=(8, 4, 64))
            problem = sampled_problem.sampled_problem(shape, torch.bfloat16, 16, Pool(8 << 20, CPU), "a")
            made, _ = attention.all_made(problem, [], {}, bare=True)
            assert any("ragged" in name for name in made) == ragged
            assert set(checked(made)[0]) == set(made)


def test_bare_kernels_of_deadly_head_dims_are_not_run() -> None:
    problem = sampled_problem.sampled_problem(Shape((40,), (2, 2, 96)), torch.bfloat16, 16, Pool(8 << 20, CPU), "a")
    for name in ("FA3", "FA3, scheduled once"):
        with pytest.raises(ValueError, match="head dim 96 is none of"):
            bare_kernels.DECODE[name].contender(problem)


class TestStatistics:
    def test_a_summary_by_hand(self) -> None:
        found = random_statistics.summary([0.8, 1.25, 1.0, 1.0, 2.0])
        assert found == (5, pytest.approx(2 ** (1 / 5)), 1.0, 2.0, 2.0, 0.6)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60))
    def test_an_interval_holds_the_median(self, values: list[float]) -> None:
        low, high = random_statistics.interval(values)
        assert low <= random_statistics.quantile(values, 0.5) <= high

    def test_an_interval_is_right_at_95_percent(self) -> None:
        """Of distributions whose median is 0."""
        torch.manual_seed(0)
        drawn = torch.randn(2000, 30, dtype=torch.float64).pow(3).tolist()
        intervals = [random_statistics.interval(values) for values in drawn]
        right = sum(low <= 0 <= high for low, high in intervals) / len(intervals)
        assert 0.94 < right < 0.975

    def test_rounds_are_paired_where_both_have_them(self) -> None:
        assert random_statistics.paired([2.0, 6.0], [1.0, 2.0]) == [2.0, 3.0]
        assert random_statistics.paired([2.0, 6.0, 9.0], [1.0, 3.0]) == [3.0]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", importlib.import_module("tests.emulated.flashinfer"))
    monkeypatch.setattr("attn_backends.registry.table._classes", {})


@pytest.fixture(scope="module")
def native() -> Iterator[None]:
    """Shapes that nobody chose have kernels that are quickly compiled: their times are not looked at."""
    with quick_native():
        yield


@pytest.fixture
def made(flashinfer: None, native: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script over a few small shapes; returns the file's content. Charts, which take longer, are off."""
    monkeypatch.setattr(random_shapes, "draw_files", lambda path: [])
    monkeypatch.setattr(shape_draws, "KINDS", {"decode": 1.0})
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)

    def run(*more: str, name: str = "some") -> dict[str, Any]:
        path = tmp_path / f"{name}.json"
        asked = ["--device", "cpu", "--backend", "TORCH", "--rounds", "2", "--json", str(path)]
        random_shapes.main([*asked, *more])
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    return run


class TestRuns:
    def test_a_run_is_continued(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        first = made("--seed", "1000", "--count", "2")["rows"]
        measured: list[str] = []
        inner = random_shapes.prepare
        monkeypatch.setattr(random_shapes, "prepare", lambda *given: measured.append(given[-1].id) or inner(*given))
        both = made("--seed", "1000", "--count", "3")["rows"]
        assert both[:2] == first
        assert measured == ["1000/2"]
        assert made("--seed", "1000", "--count", "3", "--minutes", "0")["rows"] == both
        assert len(made("--seed", "1000", "--count", "9", "--minutes", "0")["rows"]) == 3, "no time for more"

    def test_rows_say_who_took_how_long(self, made: Any) -> None:
        result = made("--seed", "1000", "--count", "4")
        assert (result["purpose"], result["of"], result["bounds"]) == ("judging", "TORCH", "cpu")
        for row in result["rows"]:
            others = {name: us for name, us in row["us"].items() if name != "TORCH"}
            if others:
                assert row["best other"] == min(others, key=others.__getitem__)
                assert row["low"] <= row["ratio"] <= row["high"]
                assert row["others"] == 1
            assert row["AUTO"] == "TORCH"
            assert row["AUTO vs best of ours"] == 1
            assert row["of read"] == pytest.approx(row["read us"] / row["us"]["TORCH"], rel=1e-3)
            assert any(line.startswith("FA4: ModuleNotFoundError") for line in row["dropped"])

    def test_other_seeds_and_other_code_begin_files_of_their_own(
        self, made: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made("--seed", "1000", "--count", "1")
        with pytest.raises(SystemExit, match=r"has seed \[1000\], and this run \[1001\]"):
            made("--seed", "1001", "--count", "1")
        monkeypatch.setattr(random_results, "source", lambda: "other")
        with pytest.raises(SystemExit, match=r"has source .*, and this run other: name another file"):
            made("--seed", "1000", "--count", "1")
        assert made("--seed", "1000", "--count", "1", "--again")["source"] == "other"

    def test_results_are_merged(self, made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        made("--seed", "1000", "--count", "2", name="a")
        made("--seed", "1001", "--count", "1", name="b")
        made("--seed", "1", "--count", "1", name="tuned")
        paths = [str(tmp_path / f"{name}.json") for name in ("b", "a", "a")]
        random_shapes.main(["--merge", *paths, "--json", str(tmp_path / "all.json")])
        whole = json.loads((tmp_path / "all.json").read_text())
        assert [row["id"] for row in whole["rows"]] == ["1000/0", "1000/1", "1001/0"]
        assert whole["seed"] == [1000, 1001]
        with pytest.raises(SystemExit, match="results of purpose 'judging' and 'tuning' do not add up to one"):
            random_shapes.main(["--merge", paths[0], str(tmp_path / "tuned.json"), "--json", str(tmp_path / "no.json")])
        assert "no claim stands on this report" in capsys.readouterr().out

    def test_a_shape_that_fails_is_a_row(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(random_measure, "problem_of", lambda *_: (_ for _ in ()).throw(MemoryError("none")))
        (row,) = made("--seed", "1000", "--count", "1")["rows"]
        assert row["dropped"] == ["all: MemoryError: none"]
        assert row["ratio"] is None

    def test_nothing_is_compiled_unless_it_is_asked_for(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        made("--seed", "1000", "--count", "1", "--compile")
        assert "FLASHINFER_DISABLE_JIT" not in random_shapes.os.environ
        made("--seed", "1000", "--count", "1")
        assert random_shapes.os.environ["FLASHINFER_DISABLE_JIT"] == "1"

    def test_charts_are_drawn(self, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(random_shapes, "draw_files", random_plot.draw_files)
        made("--seed", "1000", "--count", "2")
        assert (tmp_path / "some.png").stat().st_size > 10_000
        assert "time over that of the best of all others" in (tmp_path / "some.svg").read_text()

    @pytest.mark.first
    @pytest.mark.rest
    def test_processes_make_shapes_ready(self, tmp_path: Path) -> None:
        """By the command itself: processes begin by importing what it runs."""
        command = ["-m", "benchmarks", "attention", "random_shapes", "--device", "cpu", "--seed", "7", "--backend"]
        command += ["TORCH", "--no-bare", "--count", "3", "--processes", "2", "--rounds", "1", "--json"]
        done = run_python(*command, str(tmp_path / "a.json"))
        assert done.returncode == 0, done.stderr
        assert "seed 7, which is for tuning" in done.stdout
        rows = json.loads((tmp_path / "a.json").read_text())["rows"]
        assert [row["id"] for row in rows] == ["7/0", "7/1", "7/2"]
        assert all(row["us"]["TORCH"] > 0 for row in rows)

    def test_a_shape_without_memory_is_measured_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        counts = []

        def rows_of(shapes: Sequence[Any], count: int, *_: Any) -> Iterator[tuple[Any, Any]]:
            for each in shapes:
                counts.append(count)
                row = random_measure.without_times(each, "none") | {"dropped": []}
                if count > 1:
                    row["dropped"] = ["FA3: OutOfMemoryError: full"]
                yield each, Failed("OutOfMemoryError: full") if count > 1 and each.index else row

        monkeypatch.setattr(processes, "rows_of", rows_of)
        path = tmp_path / "a.json"
        asked = ["--device", "cpu", "--backend", "TORCH", "--count", "2", "--seed", "1", "--processes", "4"]
        random_shapes.run(random_shapes.parse([*asked, "--json", str(path)]))
        assert counts == [4, 4, 1, 1]
        assert [row["dropped"] for row in json.loads(path.read_text())["rows"]] == [[], []]


def row(index: int, ratio: float | None, others: int = 2, **more: Any) -> dict[str, Any]:
    each = random_measure.describe(draw(1000, index))
    return each | {"us": {"TRITON": 10.0, "FA3": 9.0}, "best other": "FA3", "ratio": ratio, "low": ratio, "high": ratio,
                   "others": others, "read us": None, "dropped": []} | more  # fmt: skip


ROWS = [row(0, 0.5), row(1, 2.0), row(2, 1.0), row(3, 4.0, others=1), row(4, None, dropped=["TRITON: X: y"])]
RESULT = {"of": "TRITON", "seed": [1000], "purpose": "judging", "gpu": "a GPU", "date": "2026-11-25", "rows": ROWS}


class TestReport:
    def test_the_headline_counts_what_two_others_serve(self) -> None:
        text = report_of(RESULT)
        assert "**TRITON takes 1.000 times as long as the best of all others** (geometric mean of 3 shapes" in text
        assert "worst 2.000; the faster one at 67%)" in text
        assert "1 more shapes have fewer than 2 others" in text
        above = [line for line in text.splitlines() if line.startswith("| 1000/")]
        assert [line.split(" | ")[0] for line in above] == ["| 1000/3", "| 1000/1"]
        assert "| TRITON | X: y | 1 |" in text

    def test_decodes_beside_those_that_serve_other_lengths_from_one_graph(self) -> None:
        us = {"TRITON": 10.0, "FlashInfer tensor-core, fixed lengths": 4.0, "FA3, scheduled once": 5.0, "FA3": 20.0}
        rows = [row(i, 2.5, us=us, kind=kind) for i, kind in enumerate(("decode", "decode", "verify"))]
        text = report_of(RESULT | {"rows": [*rows, row(3, 1.2, us={"TRITON": 12.0, "FA3": 10.0}, kind="decode")]})
        assert "it takes 0.669 times as long at 3 shapes of decodes" in text
        assert "worst 1.200; 1 above 1.05)" in text

    def test_shares_of_reading_and_autos_choices(self) -> None:
        auto = {"AUTO": "TRITON", "AUTO vs others": 0.9}
        rows = [
            row(i, 1.0, **{"of read": 0.5 + 0.25 * i, "AUTO vs best of ours": 1 + 0.02 * i}, **auto) for i in range(3)
        ]
        text = report_of(RESULT | {"rows": rows})
        assert "reaches 0.721 (geometric mean of 3 shapes with decodes alone), and 0.500 or more at 99 %" in text
        assert "within 1.03 of the best backend of ours at 67% of 3 shapes (99 % up to 1.040, worst 1.040)" in text
        assert "AUTO's choice takes 0.900 times as long as the best of other libraries'" in text

    def test_what_has_no_time_is_named(self) -> None:
        rows = [*ROWS, row(5, None, us={}, dropped=["TRITON: ValueError: wrong output"])]
        text = report_of(RESULT | {"rows": rows})
        assert "TRITON has no time at 1 shapes:" in text
        assert f"| 1000/5 | {rows[-1]['shape']} | {rows[-1]['dtype']} | {rows[-1]['page']} | TRITON: ValueError" in text

    def test_of_tuning_it_says_so(self) -> None:
        assert "no claim stands on this report" in report_of(RESULT | {"purpose": "tuning"})
        assert "no claim stands" not in report_of(RESULT)


EXPECTED = [
    ("decode", "Phi-2, 1/8", (4, 4, 80), 53974),
    ("decode", "Llama-2-7B, 1/2", (16, 16, 128), 106457),
    ("mixed", "EXAONE-3.5-2.4B, 1/2", (16, 4, 80), 1351),
]
