"""AUTO on a GPU: backends that were measured go by the nearest shape; others stay where their priority puts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec, explain, plan_groups
from attn_backends.entries import BackendEntry, backends
from attn_backends.measured import Load, fastest_first, nearest
from attn_backends.registry import _auto_entries, _measured, _reason
from attn_backends.verdicts import Verdict

ROOT = Path(__file__).parents[1]
GQA = plan_groups({0: AttentionSpec(32, 8, 128, dtype=torch.bfloat16)})
FEW = plan_groups({0: MLASpec(16, dtype=torch.bfloat16)})
MANY = plan_groups({0: MLASpec(128, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("groups", "load", "found"),
    [
        (GQA, Load(64, 4096), ((32, 8, 128), (64, 4096))),
        (GQA, Load(300, 900), ((32, 8, 128), (256, 1024))),
        (plan_groups({0: AttentionSpec(9, 3, 64)}), Load(2, 100), ((9, 3, 64), (64, 4096))),
        (FEW, Load(1, 8192), ((16, 1, 576), (1, 8192))),
        (MANY, Load(200, 5000), ((128, 1, 576), (128, 4096))),
    ],
)
def test_the_nearest_shape_counts(groups: object, load: Load, found: tuple[object, object]) -> None:
    measured = nearest(groups, load)  # type: ignore[arg-type]
    assert measured is not None
    assert (measured.heads, measured.load) == found


def test_layers_of_the_commonest_kind_count() -> None:
    small, large = AttentionSpec(9, 3, 64), AttentionSpec(64, 8, 128)
    measured = nearest(plan_groups({0: large, 1: small, 2: small}), Load())
    assert measured is not None
    assert measured.heads == (9, 3, 64)


def test_measured_ones_share_their_places() -> None:
    measured = nearest(GQA, Load())
    assert measured is not None
    slowest_first = [*reversed(measured.us)]
    names = ["PLUGIN", slowest_first[0], "OTHER", *slowest_first[1:], "TORCH"]
    ordered = fastest_first([BackendEntry(name, "a:B") for name in names], measured)
    fastest = [*measured.us]
    assert [entry.name for entry in ordered] == ["PLUGIN", fastest[0], "OTHER", *fastest[1:], "TORCH"]
    assert [*measured.us.values()] == sorted(measured.us.values())


def test_a_gpu_has_the_order_of_its_times_and_a_cpu_that_of_priorities() -> None:
    assert _measured("AUTO", GQA, "cpu", None) is None
    assert _measured("TRITON", GQA, "cuda", None) is None
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert _measured("auto", GQA, device, None) == nearest(GQA, Load())
    by_priority = [entry.name for entry in _auto_entries(None)]
    alone, many = (_auto_entries(_measured("AUTO", FEW, "cuda", load)) for load in (Load(1, 8192), Load(128, 4096)))
    assert by_priority.index("FLASHINFER_MLA") < by_priority.index("FLASH_ATTN_MLA")
    order = [entry.name for entry in alone]
    assert order.index("FLASH_ATTN_MLA") < order.index("FLASHINFER_MLA")
    assert next(entry.name for entry in many if "MLA" in entry.name) == "FLASHINFER_MLA"
    assert {entry.name for entry in alone} == set(by_priority)


def test_the_reason_says_what_was_measured() -> None:
    measured = nearest(GQA, Load(16, 4096))
    assert measured is not None
    fastest = next(iter(measured.us))
    reason = _reason("AUTO", [Verdict("PLUGIN", 99, import_error="missing"), Verdict(fastest, 1)], measured)
    assert reason.startswith(f"AUTO: the first as measured ({fastest} ")
    assert "a layer's decode of 16 x 4096 keys, 32/8 heads of 128, on NVIDIA H200" in reason
    assert reason.endswith("PLUGIN was passed over: missing")
    assert "by priority" in _reason("AUTO", [Verdict("TORCH", 0)], measured)


def test_explain_takes_a_load() -> None:
    cache = KVCacheSpec(num_pages=4, page_size=16)
    found = explain("AUTO", [AttentionSpec(4, 2, 64)], cache, "cpu", Load(1, 10))
    assert found.chosen == "TORCH"


def test_the_table_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody edits it by hand."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import rank_backends

    rows, where = rank_backends.rows()
    table = json.loads((ROOT / "attn_backends" / "measured.json").read_text())
    assert table == {"where": where, "rows": json.loads(json.dumps(rows))}
    assert {name for row in rows for name in row["us"]} <= set(backends)


def test_auto_takes_no_backend_that_is_much_slower_than_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pages of 16, which FLASHMLA does not serve, and of 64, which FLASH_ATTN_MLA does not."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import rank_backends

    taken = rank_backends.choices()
    assert {row["AUTO"] for row in taken} >= {"TRITON", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "TRITON_MLA"}
    assert max(row["vs fastest there"] for row in taken) <= 1.03
    assert max(row["vs fastest"] for row in taken if row["page size"] != 64) <= 1.03
    assert max(row["vs fastest"] for row in taken) <= 1.04
