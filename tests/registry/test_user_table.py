"""The user's own times: by device and versions, before shipped ones, stale with others; pairs that AUTO chooses."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec, explain, plan_groups, register_backend, select_backend
from attn_backends.machine import cpu_name
from attn_backends.registry import table, user_table
from attn_backends.registry.measured import Load, Measured, nearest
from attn_backends.registry.select import _measured, auto_order
from attn_backends.registry.user_table import Layer, Row, UserTable, installed_versions, read_table, save_table
from tests.helpers.fake_backends import fake_backend

H200 = "NVIDIA H200"
SPEC, CACHE = AttentionSpec(4, 2, 64), KVCacheSpec(4)
VERSIONS = installed_versions(["torch", "numpy"])


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tables of this test alone, and backends ONE and OTHER, of which ONE goes first by priority."""
    monkeypatch.setattr(table, "_classes", {})
    monkeypatch.setattr(table, "_rows", functools.cache(table._rows.__wrapped__))
    monkeypatch.setattr(user_table, "table_folder", lambda: tmp_path)
    for name, priority in (("ONE", 60), ("OTHER", 50)):
        register_backend(name, fake_backend(name, name), priority=priority)
    return tmp_path


def times(
    decode: dict[str, float], prefill: dict[str, float] | None = None, spec: AttentionSpec = SPEC,
    load: tuple[int, int] = (64, 4096), device: str | None = None, versions: Any = VERSIONS,
) -> UserTable:  # fmt: skip
    rows = [Row(Layer.of(spec), "decode", Load(*load), decode)]
    rows += [Row(Layer.of(spec), "prefill", Load(1, keys), {name: us * keys for name, us in prefill.items()})
             for keys in (100, 1000)] if prefill else []  # fmt: skip
    return UserTable(device or cpu_name(), "2026-11-25", versions, tuple(rows))


def chosen(*, specs: list[AttentionSpec] | None = None) -> tuple[str, str]:
    selection = select_backend("AUTO", specs or [SPEC], CACHE, "cpu")
    told = explain("AUTO", specs or [SPEC], CACHE, "cpu")
    assert (told.chosen, told.reason) == (selection.name, selection.reason)
    return selection.name, selection.reason


def test_auto_goes_by_them_and_says_so(folder: Path) -> None:
    assert chosen()[0] == "ONE"
    path = save_table(times({"ONE": 30.0, "OTHER": 20.0}))
    assert path.parent == folder
    name, reason = chosen()
    assert name == "OTHER"
    assert "as measured (OTHER 20.0 us, ONE 30.0 us: a layer's decode of 64 x 4096 keys" in reason
    assert f"{cpu_name()} (2026-11-25, by attn-backends bench)" in reason
    assert f"attn-backends bench measured on {cpu_name()} (2026-11-25; {path})" in auto_order("cpu")


def test_another_version_makes_them_stale(caplog: pytest.LogCaptureFixture) -> None:
    path = save_table(times({"ONE": 30.0, "OTHER": 20.0}, versions=VERSIONS | {"torch": "1.0", "nothing": None}))
    assert chosen()[0] == "ONE"
    assert f"the times in {path} are stale" in caplog.text
    assert f"torch {VERSIONS['torch']} (then 1.0)" in auto_order("cpu")
    assert auto_order("cpu").endswith("run attn-backends bench again")
    installed_since = replace(times({"ONE": 1.0}), versions={"torch": VERSIONS["torch"], "numpy": None})
    assert "(then not installed)" in str(installed_since.stale())
    removed = replace(times({"ONE": 1.0}), versions={"no-such-package": "2.0"})
    assert removed.stale() == "no-such-package is not installed (then 2.0)"


def test_own_times_come_before_shipped_ones_and_stale_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: H200)
    spec = AttentionSpec(32, 8, 128, dtype=torch.bfloat16)
    groups = plan_groups({0: spec})
    shipped = nearest(groups, Load(), H200)
    assert _measured("AUTO", groups, "cuda", None) == shipped
    save_table(times({"TRITON": 9.0}, spec=spec, device=H200))
    found = _measured("AUTO", groups, "cuda", None)
    assert found is not None
    assert found.us == {"TRITON": 9.0}
    assert _measured("AUTO", plan_groups({0: MLASpec(16)}), "cuda", None) is not None  # of those only shipped ones
    assert _measured("TRITON", groups, "cuda", None) is None
    save_table(times({"TRITON": 9.0}, spec=spec, device=H200, versions={"torch": "1.0"}))
    assert _measured("AUTO", groups, "cuda", None) == shipped
    assert "are stale: torch" in auto_order("cuda")


def test_times_of_another_device_kind_or_dtype_are_not_used() -> None:
    save_table(times({"ONE": 30.0, "OTHER": 20.0}, device="another CPU"))
    assert chosen()[0] == "ONE"
    for spec in (replace(SPEC, dtype=torch.float16), replace(SPEC, cache_dtype=torch.float16), MLASpec(4)):
        save_table(times({"ONE": 30.0, "OTHER": 20.0}, spec=spec))
        assert chosen()[0] == "ONE"


def test_the_nearest_layer_and_load_count() -> None:
    near = times({"ONE": 1.0, "OTHER": 2.0}, load=(1, 100))
    far = times({"ONE": 2.0, "OTHER": 1.0}, load=(256, 8192))
    wide = times({"ONE": 5.0}, spec=AttentionSpec(64, 8, 128), load=(1, 100))
    found = replace(near, rows=near.rows + far.rows + wide.rows)
    groups = plan_groups({0: SPEC})
    for load, us in ((Load(2, 200), near), (Load(128, 4000), far)):
        measured = found.measured(groups, load)
        assert measured is not None
        assert measured.us == dict(sorted(us.rows[0].us.items(), key=lambda pair: pair[1]))
    assert found.measured(plan_groups({0: AttentionSpec(32, 8, 128)}), Load(1, 100)).us == {"ONE": 5.0}  # type: ignore[union-attr]


def test_other_layers_stay_in_the_file_unless_versions_differ() -> None:
    other = AttentionSpec(8, 8, 128)
    save_table(times({"ONE": 1.0}))
    save_table(times({"ONE": 2.0}, spec=other))
    save_table(times({"ONE": 3.0}, spec=other))
    found = read_table(cpu_name())
    assert found is not None
    assert [row.us["ONE"] for row in found.rows] == [1.0, 3.0]
    save_table(times({"ONE": 4.0}, versions={"torch": "9"}))
    assert [row.us["ONE"] for row in read_table(cpu_name()).rows] == [4.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"device": 1, "date": 2, "versions": {}, "rows": [{}]}'])
def test_a_file_that_cannot_be_read_is_as_if_absent(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save_table(times({"ONE": 30.0, "OTHER": 20.0}))
    assert json.loads(path.read_text())["device"] == cpu_name()
    path.write_text(text)
    assert chosen()[0] == "ONE"
    assert "cannot be read" in caplog.text


# ---- Two backends, where each is faster at its phase. ------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        ((10, 20), (2, 1), "PREFILL=OTHER,DECODE=ONE"),
        ((20, 10), (1, 2), "PREFILL=ONE,DECODE=OTHER"),
        ((10, 10.2), (1.02, 1), "ONE"),  # less than 5 % together
        ((10, 20), (1, 2), "ONE"),
        ((20, 10), (1, 0.9), "OTHER"),
        ((10, 10.2), (1.2, 1), "OTHER"),  # alone within 2 % of the pair
    ],
)
def test_auto_takes_two_where_that_pays(decode: Any, prefill: Any, expected: str) -> None:
    names = ("ONE", "OTHER")
    save_table(times(dict(zip(names, decode, strict=True)), dict(zip(names, prefill, strict=True))))
    name, reason = chosen()
    assert name == expected
    assert "of prompts ONE" in reason


def test_two_that_cannot_share_the_cache_are_passed_over_with_the_reason() -> None:
    other = fake_backend("OTHER", "OTHER")
    other.get_kv_cache_stride_order = staticmethod(lambda layout: (3, 2, 1, 0))  # type: ignore[method-assign]
    register_backend("OTHER", other, priority=50, override=True)
    save_table(times({"ONE": 10.0, "OTHER": 20.0}, {"ONE": 3.0, "OTHER": 1.0}))
    name, reason = chosen()
    assert name == "OTHER"
    assert "PREFILL=OTHER,DECODE=ONE was passed over: kv_cache_strides: got (3, 2, 1, 0) of OTHER (prefill)" in reason


def test_without_prompts_there_are_no_pairs() -> None:
    us = {"ONE": 1.0, "OTHER": 2.0}
    assert Measured(False, (4, 2, 64), Load(), us, "here").pairs() == []
    assert Measured(False, (4, 2, 64), Load(), us, "here", {"OTHER": 1.0}).pairs() == []
    assert Measured(False, (4, 2, 64), Load(), us, "here", {"ONE": 3.0, "OTHER": 1.0}).pairs() == [
        "PREFILL=OTHER,DECODE=ONE"
    ]


def test_times_are_of_one_layer_and_of_a_window_where_it_has_one() -> None:
    windowed = replace(SPEC, window_left=1000)
    of_full, of_window = times({"ONE": 1.0}, {"ONE": 7.0}), times({"ONE": 2.0}, {"ONE": 9.0}, windowed)
    both = replace(of_full, rows=of_full.rows + of_window.rows)
    for spec, alone in ((SPEC, of_full), (windowed, of_window), (replace(SPEC, window_left=7), of_window)):
        groups = plan_groups({0: spec})
        assert both.measured(groups, Load(64, 4096)) == alone.measured(groups, Load(64, 4096))
