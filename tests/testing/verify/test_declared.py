"""`verify --declared`: every declared value is a factor's, every served pair is in a case, and only what ran counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.native.paged_decode import PagedDecode
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport
from attn_backends.registry import get_backend
from attn_backends.registry.table import BUILT_IN, get_class
from attn_backends.spec import AttentionType
from attn_backends.testing.verify.campaign import Tally
from attn_backends.testing.verify.covering import (
    CoveringArray,
    Served,
    missing_rows,
    most_first,
    plan_declared,
    row_of,
    served_by,
)
from attn_backends.testing.verify.declared import OF_DECODERS, draw_declared, refusal
from attn_backends.testing.verify.factors import FIELDS, NUM_DRAWN, factors
from attn_backends.testing.verify.pairs import Pairs
from attn_backends.testing.verify.report import repeat_command
from attn_backends.testing.verify.run import Outcome, run_case
from attn_backends.testing.verify.sizes import SIZES
from attn_backends.testing.verify.values import values_of
from attn_backends.testing.verify.worker import Asked, cases_of, prepare, run_seed
from benchmarks.correctness.merge_verify import merge
from tests.helpers.mutants import mutant, other_forward
from tests.testing.verify.test_verify import ROOT, check_refused, verify

NAMES = ("TORCH", "TORCH_MLA")
EVERYTHING = Capabilities(
    devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}), cache_dtypes=frozenset({torch.float32})
)
MORE: dict[str, Any] = {  # a declaration beyond EVERYTHING's, by field
    "dtypes": frozenset({torch.float32, torch.float64}),
    "cache_dtypes": frozenset({torch.float32, torch.float8_e5m2}),
    "head_dims": frozenset({40, 48}),
    "page_sizes": frozenset({24}),
    "page_size_multiple": 8,
    "layouts": frozenset({"NHD", "HND"}),
    "attention_types": frozenset(AttentionType),
    "cuda_graph": CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "head_counts": frozenset({8}),
    "kv_lora_ranks": frozenset({48}),
    "qk_rope_head_dims": frozenset({24}),
}


def with_capabilities(can: Capabilities, base: Any = TorchBackend) -> Any:
    return type("Declaring", (base,), {"capabilities": staticmethod(lambda: can)})


@pytest.mark.parametrize("name", [field.name for field in fields(Capabilities)])
def test_each_field_of_capabilities_has_a_factor_or_a_reason(name: str) -> None:
    before = replace(EVERYTHING, mla=name in ("kv_lora_ranks", "qk_rope_head_dims"))
    if isinstance(FIELDS[name], str):
        assert len(FIELDS[name]) > 10
        return
    declared, more = (
        factors(with_capabilities(can)) for can in (before, replace(before, **{name: MORE.get(name, True)}))
    )
    changed = {factor for factor in declared.keys() | more.keys() if declared.get(factor) != more.get(factor)}
    assert changed
    assert changed & set(FIELDS[name])


def test_a_field_that_no_factor_stands_for_is_refused() -> None:
    @dataclass(frozen=True)
    class Newer(Capabilities):
        clairvoyant: bool = False

    can = Newer(**vars(EVERYTHING))
    with pytest.raises(ValueError, match=r"no factor stands for clairvoyant.* FIELDS of factors.py"):
        factors(with_capabilities(can))


@pytest.mark.parametrize("name", [entry.name for entry in BUILT_IN])
def test_every_declared_value_of_a_backend_is_a_factor_s(name: str) -> None:
    backend = get_class(next(entry for entry in BUILT_IN if entry.name == name))
    can, found = backend.capabilities(), factors(backend)
    assert {f"torch.{word}" for word in found["dtype"]} == {str(dtype) for dtype in can.dtypes}
    assert {f"torch.{word}" for word in found["cache_dtype"]} == {str(dtype) for dtype in can.cache_dtypes}
    assert set(found["layout"]) == can.layouts
    assert set(found["attention_type"]) == {kind.value for kind in can.attention_types}
    for feature in ("window", "soft_cap", "sinks", "chunks", "non_causal", "lse"):
        assert ("on" in found.get(feature, ())) is getattr(can, feature)
    assert ("on" in found.get("alibi", ())) is (can.alibi or can.standard_alibi)
    assert ("head_dim_vo" in found) is can.unequal_head_dims
    assert ("not above 0" in found["scale"]) is can.any_scale
    assert len(found["run"]) == 1 + can.cuda_graph
    ranges = {"page_size": can.page_sizes, "qk_nope_head_dim" if can.mla else "head_dim": can.head_dims}
    if can.mla:
        ranges |= {"kv_lora_rank": can.kv_lora_ranks, "qk_rope_head_dim": can.qk_rope_head_dims,
                   "num_qo_heads": can.head_counts}  # fmt: skip
    for factor, declared in ranges.items():
        if declared is not None:
            assert set(found[factor]) == declared
        else:
            assert len(found[factor]) == NUM_DRAWN + 2
    assert factors(backend) == found
    assert all(size % can.page_size_multiple == 0 for size in found["page_size"] if isinstance(size, int))


@pytest.fixture(scope="module")
def arrays() -> dict[str, tuple[Served, CoveringArray]]:
    served = {name: served_by(get_backend(name), "cpu") for name in NAMES}
    return {name: (each, CoveringArray(each, 0)) for name, each in served.items()}


def small_factors() -> dict[str, Any]:
    """Of TORCH, so few values that every row can be tried."""
    kept = {"kind": ("decode", "verify", "mixed"), "dtype": ("float16", "float32"), "group": (1,), "head_dim": (16,)}
    one = ("soft_cap", "alibi", "scale", "kv_scales", "interleaved", "lse", "page_size", "layout")
    return {
        name: kept.get(name) or (values[:1] if name in one else values[:2] if name == "window" else values)
        for name, values in factors(TorchBackend).items()
    } | {"cache_dtype": ("float16", "float8_e5m2")}


class Choosy(TorchBackend):
    """Refuses three things at once, where any two of them are served."""

    @classmethod
    def reject(cls, spec: Any, cache: Any, device: Any) -> Any:
        found = TorchBackend.reject(spec, cache, device)
        if spec.dtype is torch.float16 and spec.sinks and spec.window_left == 0:
            found += TorchBackend.reject(replace(spec, dtype=torch.int8, cache_dtype=spec.cache_dtype), cache, device)
        return found


def test_the_array_has_all_pairs_that_are_served() -> None:
    given = small_factors()
    given["window"], every = ("off", "0"), dict[tuple[int, int], bool]()
    served = Served(given, lambda row: refusal(Choosy, row, "cpu"))
    for chosen in product(*((*values, None) if name in OF_DECODERS else values for name, values in given.items())):
        row = {name: value for name, value in zip(given, chosen, strict=True) if value is not None}
        if refusal(Choosy, row, "cpu") is None:
            every |= dict.fromkeys(combinations(sorted(served.pairs.numbers(row)), 2), True)
    array, covered = CoveringArray(served, 3), Pairs(given)
    rows = [row for block in array.blocks for row in block]
    for row in rows:
        assert refusal(Choosy, row, "cpu") is None
        covered.add(row)
    assert {pair for pair in covered.all() if covered.has(*pair)} == set(every)
    refused = {pair for pairs in served.refused.values() for pair in pairs.all() if pairs.has(*pair)}
    assert refused == set(covered.all()) - set(every)
    assert refused
    assert len(rows) < 40


def test_a_rule_that_fails_is_no_refusal() -> None:
    class Failing(TorchBackend):
        @classmethod
        def reject(cls, *_: Any) -> Any:
            raise ValueError("a fault of the rule")

    with pytest.raises(ValueError, match="a fault of the rule"):
        served_by(Failing, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_what_an_array_leaves_out_is_refused(name: str, arrays: Any) -> None:
    served, array = arrays[name]
    covered = Pairs(served.factors)
    for block in array.blocks:
        for row in block:
            assert refusal(get_backend(name), row, "cpu") is None
            covered.add(row)
    refused = list(served.refused.values())
    assert covered.unseen(refused) == {}
    assert not any(pairs.has(i, j) for pairs in refused for i, j in covered.all() if covered.has(i, j))
    assert all(covered.has(i, i) for i in range(len(covered.values)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_a_case_has_the_values_of_its_row(name: str, size: str, arrays: Any) -> None:
    served, array = arrays[name]
    for number, row in enumerate(row for block in array.blocks for row in block):
        case = draw_declared(get_backend(name), row, number, SIZES[size], "cpu")
        found = values_of(case, served.factors, in_graph=case.graph_rows > 0)
        assert row in found, found


def told_of_arrays() -> list[str]:
    """A digest of each backend's array of another seed, and of some cases."""
    told = []
    for name in NAMES:
        asked = Asked(name, "cpu", "medium", None, (), declared=True)
        jobs = [job for block in plan_declared(asked, 5, None).blocks for job in block]
        cases = [next(cases_of(asked, prepare(asked), *job)) for job in jobs[:40]]
        told.append(sha256(repr([jobs, cases]).encode()).hexdigest())
    return told


@pytest.mark.first
@pytest.mark.rest
def test_arrays_and_cases_are_the_same_in_every_process() -> None:
    """Whose strings have other hashes than this one's."""
    code = f"from {__name__} import told_of_arrays; print(hash('a'), *told_of_arrays())"
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True)
        own, *told = done.stdout.split()
        if int(own) != hash("a"):
            break
    assert int(own) != hash("a")
    assert told == told_of_arrays()


def test_a_case_s_row_is_found_by_its_number(arrays: Any) -> None:
    asked = Asked("TORCH", "cpu", "small", None, (), declared=True)
    rows = [row for block in arrays["TORCH"][1].blocks for row in block]
    jobs = [job for block in plan_declared(asked, 0, 17).blocks for job in block]
    assert jobs == list(enumerate(rows[:17]))
    assert row_of(asked, 40) == rows[40]
    second = 1 << 20  # the first case of --seed 1
    assert row_of(asked, second) != rows[0]
    with pytest.raises(ValueError, match=rf"--case is {second - 1}; .* cases 0 to {len(rows) - 1}"):
        row_of(asked, second - 1)


def test_rows_that_have_run_are_left_out(arrays: Any) -> None:
    served, array = arrays["TORCH"]
    covered = Pairs(served.factors)
    kept = missing_rows(array.blocks, covered)
    assert [row for block in kept for _, row in block] == [row for block in array.blocks for row in block]
    for block in array.blocks[:-1]:
        for row in block:
            covered.add(row)
    left = [row for block in missing_rows(array.blocks, covered) for _, row in block]
    assert left
    assert all(row in array.blocks[-1] for row in left)


@pytest.mark.parametrize("is_native", [True, False], ids=["C", "Python"])
def test_cases_of_torch_pass(is_native: bool, monkeypatch: pytest.MonkeyPatch, arrays: Any) -> None:
    if not is_native:
        monkeypatch.setattr(PagedDecode, "serves", lambda spec, device: False)
    rows = [row for block in arrays["TORCH"][1].blocks for row in block][::12]
    tally = tally_of("TORCH", TorchBackend, rows)
    assert tally.findings == []
    assert tally.pairs.num_seen > len(rows) * 100


def tally_of(name: str, backend: Any, rows: Any, size: str = "small") -> Tally:
    tally = Tally(Pairs(factors(backend)))
    for number, row in enumerate(rows):
        tally.add(run_seed(Asked(name, "cpu", size, None, (), declared=True), backend, number, row))
    return tally


def no_sinks(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    if layer.spec.sinks:
        raise RuntimeError("an illegal instruction was encountered")
    output: torch.Tensor = forward(**given)
    return output


def test_a_case_in_which_anything_is_found_has_shown_nothing(arrays: Any) -> None:
    rows = [row for block in arrays["TORCH"][1].blocks for row in block][::8]
    tally = tally_of("TORCH", other_forward(no_sinks), rows)
    asked = [row["sinks"] for row in rows]
    assert len(tally.findings) == asked.count("on") > 4
    assert tally.values["sinks", "on"] == 0
    assert tally.values["sinks", "off"] == asked.count("off") > 4
    assert tally.pairs.masks[tally.pairs.number["sinks", "on"]] == 0


def test_a_finding_is_not_counted_whatever_values_come_with_it() -> None:
    tally = Tally(Pairs({"dtype": ("float32",), "lse": ("off", "on")}))
    tally.add(Outcome(0, "decode", finding="wrong", values=[{"dtype": "float32", "lse": "on"}]))
    assert not tally.values
    assert tally.pairs.num_seen == 0
    tally.add(Outcome(1, "decode", values=[{"dtype": "float32", "lse": "on"}]))
    assert tally.values == {("dtype", "float32"): 1, ("lse", "on"): 1}
    assert tally.pairs.num_seen == 1


def test_values_of_layers_that_did_not_run_together_are_no_pair() -> None:
    """A window in one layer and sinks in another: each has run, the pair has not."""
    tally = Tally(Pairs({"window": ("off", "on"), "sinks": ("off", "on")}))
    tally.add(Outcome(0, "decode", values=[{"window": "on", "sinks": "off"}, {"window": "off", "sinks": "on"}]))
    number = tally.pairs.number
    assert tally.values["window", "on"] == tally.values["sinks", "on"] == 1
    assert not tally.pairs.has(number["window", "on"], number["sinks", "on"])


def test_a_graph_that_does_not_hold_the_batch_counts_as_eager(arrays: Any) -> None:
    class NoGraphs(TorchBackend.get_builder_cls()):  # type: ignore[misc]
        def can_run_in_cudagraph(self, common_attn_metadata: Any) -> bool:
            return False

    row = next(row for block in arrays["TORCH"][1].blocks for row in block if row["run"] != "eager")
    tally = tally_of("TORCH", mutant(NoGraphs), [row])
    assert tally.values["run", "eager"] == 1
    assert tally.values["run", row["run"]] == 0
    assert tally.refused["graph of a batch"] == 1


def test_what_is_refused_while_it_runs_has_not_run(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.interface.capabilities import Unsupported
    from attn_backends.testing.verify import run

    def refuse(*_: Any) -> None:
        raise Unsupported("TORCH", [])

    monkeypatch.setattr(run._Run, "episodes", refuse)
    row = arrays["TORCH"][1].blocks[0][0]
    case = draw_declared(TorchBackend, row, 0, SIZES["small"], "cpu")
    assert run_case(TorchBackend, case, "cpu").values == []


@pytest.mark.first
def test_the_command_runs_and_goes_on(tmp_path: Path) -> None:
    file, rest = tmp_path / "report.json", tmp_path / "rest.json"
    common = ("torch", "--declared", "--size", "small", "--device", "cpu", "--workers", "1")
    done = verify(*common, "--cases", "2", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert (report["declared"], report["continued"], report["num_cases"], report["findings"]) == (True, False, 2, [])
    assert report["values"].keys() == factors(TorchBackend).keys()
    assert sum(report["values"]["dtype"].values()) == 2
    assert f"{report['num_pairs']['run']} of 3266 pairs of them ran, 8 refused (cuda_graph), 41" in done.stdout
    assert set(report["pairs"]["refused"]) == {"cuda_graph", "no such case"}
    done = verify(*common, "--cases", "1", "--covered", str(file), "--json", str(rest))
    assert done.returncode == 0, done.stdout + done.stderr
    continued = json.loads(rest.read_text())
    assert continued["continued"] is True
    both = merge([report, continued])["backends"]["TORCH"]
    assert both["num_pairs"]["run"] > merge([report])["backends"]["TORCH"]["num_pairs"]["run"]


def test_one_case_of_the_array_alone() -> None:
    done = verify("TORCH", "--declared", "--case", "6", "--size", "small", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found: nothing" in done.stdout


def test_a_finding_of_the_array_is_repeated_by_its_command() -> None:
    asked = Asked("TORCH", "cpu", "small", None, ("tests.helpers.dying_backend",), declared=True)
    assert repeat_command(asked, 7) == (
        "attn-backends verify TORCH --declared --case 7 --device cpu --size small --import tests.helpers.dying_backend"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("TORCH", "--covered", "no.json"), "--covered goes with --declared"),
        (("TORCH", "--declared", "--case", "100000"), "--case is 100000; the array of seed 0 has cases 0 to "),
        (("TORCH", "--declared", "--covered", "pyproject.toml"), "--covered pyproject.toml cannot be read"),
    ],
)
def test_what_makes_no_sense_is_said(arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_refused(told, *arguments)


def test_what_adds_most_pairs_comes_first() -> None:
    covered = Pairs({"a": (1, 2), "b": (1, 2), "c": (1, 2)})
    covered.add({"a": 1, "b": 1})
    rows = [{"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 1}, {"a": 1, "c": 1}]
    assert [block[0][0] for block in most_first([[(i, row)] for i, row in enumerate(rows)], covered)] == [1, 0]


def test_an_array_of_some_values_alone_and_its_rows_again() -> None:
    asked = Asked("TORCH", "cpu", "small", None, (), declared=True, where=("dtype=float32", "head_dim=64,128"))
    assert TypeAdapter(Asked).validate_json(json.dumps(asdict(asked))) == asked  # as a worker is told it
    jobs = [job for block in plan_declared(asked, 3, None).blocks for job in block]
    assert {row["dtype"] for _, row in jobs} == {"float32"}
    assert {row["head_dim"] for _, row in jobs} == {64, 128}
    assert len({row["page_size"] for _, row in jobs}) > 5
    assert all(row_of(asked, seed) == row for seed, row in jobs[::60])
    assert not plan_declared(asked, 3, None).refused  # other dtypes may be served with what float32 is not
    assert "--where head_dim=64,128" in repeat_command(asked, 7)


@pytest.mark.parametrize(("words", "message"), [("hue=1", "no 'hue' here"), ("dtype=int3", "none of int3; allowed")])
def test_values_that_are_not_declared_are_named(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_declared(Asked("TORCH", "cpu", "small", None, (), declared=True, where=(words,)), 0, 1)


def test_where_goes_with_declared() -> None:
    done = verify("TORCH", "--device", "cpu", "--cases", "1", "--where", "dtype=float32")
    assert done.returncode
    assert "--where goes with --declared" in done.stdout + done.stderr
