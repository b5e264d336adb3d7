"""AUTO on a GPU: backends that were measured go by the nearest shape; others stay where their priority puts them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec, explain, plan_groups, select_backend
from attn_backends.registry import measured as measured_module, table
from attn_backends.registry.measured import Load, Measured, fastest_first, nearest, unmeasured, with_pairs
from attn_backends.registry.phases import phased_name
from attn_backends.registry.select import _auto_entries, _choice, _measured, auto_order
from attn_backends.registry.table import BackendEntry, backends
from attn_backends.registry.verdicts import Verdict

ROOT = Path(__file__).parents[2]
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
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
    measured = nearest(groups, load, H200)  # type: ignore[arg-type]
    assert measured is not None
    assert (measured.heads, measured.load) == found


def test_layers_of_the_commonest_kind_count() -> None:
    small, large = AttentionSpec(9, 3, 64), AttentionSpec(64, 8, 128)
    measured = nearest(plan_groups({0: large, 1: small, 2: small}), Load(), H200)
    assert measured is not None
    assert measured.heads == (9, 3, 64)


def test_measured_ones_share_their_places() -> None:
    measured = nearest(GQA, Load(), H200)
    assert measured is not None
    slowest_first = [*reversed(measured.us)]
    names = ["PLUGIN", slowest_first[0], "OTHER", *slowest_first[1:], "TORCH"]
    ordered = fastest_first([BackendEntry(name, "a:B") for name in names], measured)
    fastest = [*measured.us]
    assert [entry.name for entry in ordered] == ["PLUGIN", fastest[0], "OTHER", *fastest[1:], "TORCH"]
    assert [*measured.us.values()] == sorted(measured.us.values())


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the GPU that is here."""
    name: str = getattr(request, "param", H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    return name


@pytest.mark.usefixtures("gpu")
def test_the_measured_gpu_has_the_order_of_its_times_and_a_cpu_that_of_priorities() -> None:
    assert _measured("AUTO", GQA, "cpu", None) is None
    assert _measured("TRITON", GQA, "cuda", None) is None
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert _measured("auto", GQA, device, None) == nearest(GQA, Load(), H200)
    by_priority = [entry.name for entry in _auto_entries(None)]
    alone, many = (_auto_entries(_measured("AUTO", FEW, "cuda", load)) for load in (Load(1, 8192), Load(128, 4096)))
    assert by_priority.index("FLASHINFER_MLA") < by_priority.index("FLASH_ATTN_MLA")
    order = [entry.name for entry in alone]
    assert order.index("FLASH_ATTN_MLA") < order.index("FLASHINFER_MLA")
    assert next(entry.name for entry in many if "MLA" in entry.name) == "TRITON_MLA"
    assert {entry.name for entry in alone} == set(by_priority)


def test_the_reason_says_what_was_measured() -> None:
    measured = nearest(GQA, Load(16, 4096), H200)
    assert measured is not None
    fastest = next(iter(measured.us))
    reason = _choice("AUTO", [Verdict("PLUGIN", 99, import_error="missing"), Verdict(fastest, 1)], measured)
    assert reason.startswith(f"AUTO: the first as measured ({fastest} ")
    assert "a layer's decode of 16 x 4096 keys, 32/8 heads of 128, on NVIDIA H200" in reason
    assert reason.endswith("PLUGIN was passed over: missing")
    assert "by priority" in _choice("AUTO", [Verdict("TORCH", 0)], measured)


OTHERS = [
    "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb",
    "NVIDIA B200", "NVIDIA L4", "Tesla T4", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X", "nvidia h200",
]  # fmt: skip


@pytest.mark.parametrize("gpu", OTHERS, indirect=True)
def test_another_gpu_has_the_order_by_priority_and_the_reason_says_so(gpu: str) -> None:
    by_priority = _auto_entries(None)
    for groups in (GQA, FEW, MANY):
        for load in (Load(1, 8192), Load(), Load(128, 4096)):
            measured = _measured("AUTO", groups, "cuda", load)
            assert measured is None
            assert _auto_entries(measured) == by_priority
    told = f"no times of {gpu} are shipped, those of {H200} and {H100} alone"
    assert auto_order("cuda") == f"by priority ({told})"
    reason = _choice("AUTO", [Verdict("TRITON", 8)], None, unmeasured(gpu, MANY))
    assert reason == f"AUTO: the first by priority ({told}) that serves every layer"


def test_each_measured_gpu_has_times_of_its_own() -> None:
    one, other = nearest(GQA, Load(), H200), nearest(GQA, Load(), H100)
    assert one is not None
    assert other is not None
    assert (one.heads, one.load) == (other.heads, other.load)
    assert H200 in str(one)
    assert H100 in str(other)
    assert other.us["TRITON"] > 1.2 * one.us["TRITON"]  # its memory is slower


def test_layers_of_a_kind_that_was_not_measured_there_go_by_priority_and_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_keys = {gpu: tuple(row for row in rows if not row.is_mla) for gpu, rows in measured_module._tables().items()}
    monkeypatch.setattr(measured_module, "_tables", lambda: of_keys)
    assert nearest(MANY, Load(), H100) is None
    assert unmeasured(H100, GQA) is None
    told = unmeasured(H100, MANY)
    assert told == f"no times of multi-head latent attention on {H100} are shipped"
    assert told in _choice("AUTO", [Verdict("TORCH_MLA", 0)], None, told)


@pytest.mark.parametrize("gpu", OTHERS, indirect=True)
def test_selection_and_explanation_on_another_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    asked = ("AUTO", [AttentionSpec(32, 8, 128, dtype=torch.bfloat16)], KVCacheSpec(8, 16), "cuda")
    selection, explanation = select_backend(*asked), explain(*asked)
    assert f"no times of {gpu} are shipped" in selection.reason
    assert (explanation.chosen, explanation.reason) == (selection.name, selection.reason)


def test_the_order_in_words(gpu: str) -> None:
    assert auto_order("cpu") == "by priority"
    assert unmeasured(None) is None
    assert auto_order("cuda:0") == f"by times measured on {gpu} for the nearest layers and load, else by priority"


def test_no_preset_states_the_order_that_code_decides() -> None:
    """`attn-backends explain` prints it. What a preset says of AUTO names no backend."""
    texts = [*(ROOT / "configs").glob("*.yaml"), ROOT / "attn_backends" / "engine" / "config.py"]
    for path in texts:
        for sentence in re.split(r"[.;]\s|\n\n", path.read_text().replace("\n# ", " ")):
            if "AUTO" in sentence and "AUTO: Final" not in sentence:
                assert not [name for name in backends if re.search(rf"\b{name}\b", sentence)], (path.name, sentence)


def test_explain_takes_a_load() -> None:
    cache = KVCacheSpec(num_pages=4, page_size=16)
    found = explain("AUTO", [AttentionSpec(4, 2, 64)], cache, "cpu", Load(1, 10))
    assert found.chosen == "TORCH"


def test_the_table_is_what_the_results_say() -> None:
    """Nobody edits it by hand."""
    from benchmarks.tune import rank_backends

    made = rank_backends.table()
    table = json.loads((ROOT / "attn_backends" / "registry" / "measured.json").read_text())
    assert table == json.loads(json.dumps(made))
    assert [*made] == [H200, H100]
    assert {name for of in made.values() for row in of["rows"] for name in row["us"]} <= set(backends)


def test_auto_takes_no_backend_that_is_much_slower_than_the_fastest() -> None:
    """From pages of 16, which FLASHMLA does not serve, and of 64, which FLASH_ATTN_MLA does not. TRITON_MLA is the
    fastest of its family everywhere."""
    from benchmarks.tune import rank_backends

    taken = rank_backends.choices()
    assert {row["AUTO"] for row in taken} >= {"TRITON", "TRITON_MLA"}
    assert max(row["vs fastest there"] for row in taken) <= 1.03
    assert max(row["vs fastest"] for row in taken if row["page size"] != 64) <= 1.03
    assert max(row["vs fastest"] for row in taken) <= 1.04


def test_all_pairs_that_pay_stand_before_what_they_beat() -> None:
    decode, prefill = {"A": 10.0, "B": 20.0, "C": 30.0}, {"A": 100.0, "B": 10.0, "C": 11.0}
    found = Measured(False, (4, 2, 64), Load(), decode, "here", prefill)
    entries = fastest_first([table.BackendEntry(name, f"nowhere:{name}") for name in "ABC"], found)
    assert [entry.name for entry in entries] == ["B", "C", "A"]  # 200, 330, 1000
    pairs = [phased_name("B", "A"), phased_name("C", "A")]  # 100, 110
    assert with_pairs(entries, found)[:3] == [*pairs, "B"]
