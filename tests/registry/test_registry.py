"""The registry: known, importable, fit. Fakes only; TORCH is the one real backend here."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from attn_backends.interface import CONTRACT, AttentionBackend
from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.registry import (
    BackendImportError,
    Explanation,
    Selection,
    UnknownBackendError,
    backends,
    explain,
    get_backend,
    register_backend,
    select_backend,
    table,
    validate_options,
)
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec
from attn_backends.validation import ConfigError
from tests.helpers.fake_backends import fake_backend, install_plugin

SPECS = {"first": AttentionSpec(4, 2, 64), "second": AttentionSpec(4, 2, 80), "third": AttentionSpec(4, 2, 80)}
CACHE = KVCacheSpec(4)
PLUGIN = """
from attn_backends import register_backend
from tests.helpers.fake_backends import fake_backend
Fake = register_backend({name!r}, priority={priority})(fake_backend({name!r}, module=__name__))
"""


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with the built-in rows and what is installed, and leaves what others have registered."""
    monkeypatch.setattr(table, "_classes", {})
    monkeypatch.setattr(table, "_rows", functools.cache(table._rows.__wrapped__))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path; modules imported from it are forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class Options(BaseModel, extra="forbid"):
    splits: int = 1


def select(name: str, device: str = "cpu") -> Selection:
    return select_backend(name, SPECS, CACHE, device)


def test_known_is_a_read_only_mapping_of_any_case() -> None:
    assert backends["torch"] is backends["TORCH"]
    assert "Torch" in backends
    assert "AUTO" not in backends
    assert 3 not in backends
    assert next(iter(backends)) == "TORCH"
    assert not hasattr(backends, "__setitem__")


def test_unknown_names_the_nearest() -> None:
    with pytest.raises(UnknownBackendError, match="no backend is named 'trch'; did you mean TORCH"):
        get_backend("trch")
    assert issubclass(UnknownBackendError, ValueError)


def test_what_is_no_name_and_no_layer_is_said() -> None:
    for call in (select_backend, explain):
        with pytest.raises(UnknownBackendError, match="no backend is named None; known: AUTO, TORCH"):
            call(None, SPECS, CACHE, "cpu")  # type: ignore[operator]
        for name in ("TORCH", "AUTO"):
            with pytest.raises(ValueError, match="no layer to serve: give each layer's AttentionSpec"):
                call(name, [], CACHE, "cpu")  # type: ignore[operator]


def test_register_a_class_a_target_and_by_decorator() -> None:
    one, two = fake_backend("ONE"), fake_backend("TWO")
    register_backend("one", one)
    assert register_backend("TWO")(two) is two
    register_backend("THREE", "no_such_module:Three", install="pip install three")
    assert (get_backend("One"), get_backend("two")) == (one, two)
    with pytest.raises(BackendImportError, match=r"THREE .*'no_such_module' is not installed.* pip install three"):
        get_backend("three")


def test_a_missing_package_hides_no_better_reason() -> None:
    """What would not serve such layers, or here, need not be installed."""
    for name in ("FLASHMLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA"):
        with pytest.raises(Unsupported, match=r"mla: got plain attention; supported: MLA"):
            select(name)
    with pytest.raises(Unsupported, match=r"device: got cpu; supported: cuda"):
        select("FLASH_ATTN")
    register_backend("GONE", "no_such_module:Gone", install="pip install gone")
    with pytest.raises(BackendImportError, match=r"pip install gone"):
        select("GONE")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("name", ["AUTO", "TRITON"])
def test_a_gpu_that_is_not_here(name: str) -> None:
    with pytest.raises(Unsupported, match=r"device: got cuda; supported: devices that are here"):
        select_backend(name, [AttentionSpec(4, 2, 64, dtype=torch.float16)], CACHE, "cuda")


def test_registering_twice() -> None:
    register_backend("ONE", "pkg.mod:One", priority=3)
    register_backend("ONE", "pkg.mod:One")
    assert backends["ONE"].priority == 3
    with pytest.raises(ValueError, match=r"ONE is pkg.mod:One \(registered\); pass override=True to make it other:One"):
        register_backend("one", "other:One")
    register_backend("one", "other:One", override=True)
    assert backends["ONE"].target == "other:One"


def test_override_replaces_an_imported_class() -> None:
    old, new = fake_backend("ONE"), fake_backend("ONE", "Newer")
    register_backend("ONE", old)
    with pytest.raises(ValueError, match="override=True"):
        register_backend("ONE", new)
    register_backend("ONE", new, override=True)
    assert get_backend("ONE") is new


def test_incomplete_classes_are_refused() -> None:
    class Abstract(AttentionBackend):
        contract = CONTRACT

    with pytest.raises(TypeError, match="lacks name, impl_cls, metadata_cls, builder_cls, state_cls, capabilities"):
        register_backend("ABSTRACT", Abstract)
    with pytest.raises(TypeError, match=r"get_name\(\) is 'ONE'; it is registered as 'TWO'"):
        register_backend("TWO", fake_backend("ONE"))
    with pytest.raises(TypeError, match="not a subclass"):
        register_backend("DICT", dict)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="cannot be named 'AUTO'"):
        register_backend("auto", "a:B")
    assert "TWO" not in backends


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise AssertionError('no GPU')", "AssertionError: no GPU"),
        ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1: cannot open"),
        ("assert False", "AssertionError"),
        ("import not_a_kernel", "module 'not_a_kernel' is not installed"),
        ("syntax error", "SyntaxError"),
        ("x = 1", "AttributeError: module 'broken' has no attribute 'Fake'"),
        ("Fake = 3", "TypeError: 3 is not a subclass"),
        ("from tests.helpers.fake_backends import fake_backend; Fake = fake_backend('OTHER')", "get_name"),
    ],
)
def test_whatever_an_import_raises_is_that_backends_reason(site: Path, source: str, reason: str) -> None:
    (site / "broken.py").write_text(source)
    register_backend("BROKEN", "broken:Fake", install="pip install broken", priority=9)
    with pytest.raises(BackendImportError) as caught:
        get_backend("broken")
    assert caught.value.__cause__ is not None
    assert reason in str(caught.value)
    assert str(caught.value).endswith("Try: pip install broken")
    assert "BROKEN" in list(backends)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert select("AUTO").name == "TORCH"
    with pytest.raises(ImportError):
        select("BROKEN")


def test_a_target_that_is_none(site: Path) -> None:
    register_backend("BROKEN", "no_colon")
    with pytest.raises(BackendImportError, match=r"must be 'package.module:Class'"):
        get_backend("BROKEN")


def test_entry_points_are_known_unimported_and_a_broken_one_hides_nothing(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_plugin(site, "broken_plugin", "BROKEN = broken_plugin:Fake", broken_plugin="raise RuntimeError('boom')")
    install_plugin(site, "good_plugin", "good = good_plugin:Fake", good_plugin=PLUGIN.format(name="GOOD", priority=-1))
    install_plugin(site, "torn_plugin", "a line without the sign")
    install_plugin(site, "greedy_plugin", "TORCH = greedy_plugin:Fake\nAUTO = greedy_plugin:Fake")
    assert {"BROKEN", "GOOD", "TORCH"} <= set(backends)
    assert not {"broken_plugin", "good_plugin"} & set(sys.modules)
    assert backends["TORCH"].source == "built-in"
    assert (backends["GOOD"].package, backends["GOOD"].install) == ("good_plugin", "pip install good_plugin")
    assert "the name is attn_backends.backends.torch.backend:TorchBackend" in caplog.text
    assert "the name is reserved" in caplog.text
    assert "torn_plugin" in caplog.text
    with pytest.raises(BackendImportError, match="RuntimeError: boom"):
        get_backend("broken")
    assert get_backend("good").get_name() == "GOOD"


def test_a_decorated_plugin_joins_the_priority(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = PLUGIN.format(name="PRIOR", priority=50)
    install_plugin(site, "prior_plugin", "PRIOR = prior_plugin:Fake", prior_plugin=plugin)
    caplog.set_level(logging.INFO)
    assert backends["PRIOR"].priority is None
    chosen = select("AUTO")
    assert (chosen.name, backends["PRIOR"].priority, backends["PRIOR"].source) == ("PRIOR", 50, "entry point")
    assert "passed over" not in caplog.text


def test_an_entry_point_may_name_a_re_export(site: Path) -> None:
    (site / "prior").mkdir()
    (site / "prior" / "__init__.py").write_text("from prior.attention import Fake")
    (site / "prior" / "attention.py").write_text(PLUGIN.format(name="PRIOR", priority=50))
    install_plugin(site, "prior_plugin", "PRIOR = prior:Fake")
    assert get_backend("prior").__module__ == "prior.attention"
    assert (backends["prior"].target, backends["prior"].package) == ("prior.attention:Fake", "prior_plugin")


def test_a_named_backend_is_used_or_refused() -> None:
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}))
    assert select("torch").backend is get_backend("TORCH")
    with pytest.raises(Unsupported, match="head_dim: got 80; supported: 64") as caught:
        select("narrow")
    assert [rejection.code for rejection in caught.value.rejections] == ["head_dim", "head_dim_vo"]


def test_auto_takes_the_first_that_serves_and_logs_why_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}), priority=20)
    register_backend("MISSING", "no_such_module:X", install="pip install missing", priority=30)
    register_backend("NEVER", fake_backend("NEVER"))
    selection = select("Auto")
    assert selection.name == "TORCH"
    assert [verdict.name for verdict in selection.verdicts] == [
        "MISSING",
        "NARROW",
        "FLASHINFER",
        "TRITON",
        "FLASH_ATTN",
        "TORCH",
    ]
    assert "AUTO passed over NARROW: head_dim: got 80" in caplog.text
    assert "AUTO passed over MISSING: module 'no_such_module' is not installed. Try: pip install missing" in caplog.text
    assert "NARROW was passed over: head_dim: got 80" in selection.reason
    register_backend("WIDE", fake_backend("WIDE"), priority=15)
    assert select("AUTO").name == "WIDE"


def test_kernels_that_would_not_serve_here_are_not_asked_for() -> None:
    reasons = {verdict.name: verdict.reasons for verdict in explain("AUTO", SPECS, CACHE, "cpu").verdicts}
    for name, found in (("FLASHINFER", "device: got cpu"), ("FLASH_ATTN", "device: got cpu"), ("FLASHMLA", "mla: got")):
        assert any(found in reason for reason in reasons[name]), reasons[name]
        assert not any("install" in reason for reason in reasons[name])


def test_auto_considers_for_mla_layers_the_mla_family_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    register_backend("WIDE", fake_backend("WIDE"), priority=99)
    mla = {"first": MLASpec(16), "second": MLASpec(16)}
    selection = select_backend("AUTO", mla, CACHE, "cpu")
    assert selection.name == "TORCH_MLA"
    kernels = ["FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA", "FLASH_ATTN_MLA"]
    assert [verdict.name for verdict in selection.verdicts] == [*kernels, "TORCH_MLA"]
    assert {line.split()[3] for line in caplog.messages} == {f"{name}:" for name in kernels}
    explanation = explain("AUTO", mla, CACHE, "cpu")
    assert (explanation.chosen, explanation.reason) == ("TORCH_MLA", selection.reason)
    refused = {verdict.name: verdict.reasons for verdict in explanation.verdicts}
    assert (
        "mla: got MLA (a latent cache); supported: plain attention. Choose AUTO, or a backend for MLA"
        in refused["TORCH"][0]
    )
    plain = {verdict.name: verdict.reasons for verdict in explain("AUTO", SPECS, CACHE, "cpu").verdicts}
    assert "mla: got plain attention; supported: MLA (a latent cache)" in plain["TORCH_MLA"][0]


def test_mla_layers_and_plain_backends_refuse_each_other_by_name() -> None:
    for name, specs in (("TORCH", [MLASpec(16)]), ("TORCH_MLA", SPECS), ("TORCH_MLA", [MLASpec(16), *SPECS.values()])):
        with pytest.raises(Unsupported, match="mla: got"):
            select_backend(name, specs, CACHE, "cpu")
    with pytest.raises(Unsupported) as caught:
        select_backend("AUTO", [MLASpec(16), *SPECS.values()], CACHE, "cpu")
    assert "mla" in {rejection.code for rejection in caught.value.rejections}
    with pytest.raises(Unsupported) as caught:
        select_backend("AUTO", [MLASpec(16)], CACHE, "meta")
    assert "(TORCH_MLA)" in str(caught.value)
    assert "(TORCH)" not in str(caught.value)


def test_auto_refuses_with_every_backends_reasons() -> None:
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}), priority=20)
    register_backend("MISSING", "no_such_module:X", priority=30)
    with pytest.raises(Unsupported) as caught:
        select_backend("AUTO", SPECS.values(), CACHE, "meta")
    text = str(caught.value)
    assert "supported: 64 (NARROW)" in text
    assert "(TORCH)" in text
    assert "import: got MISSING" in text


def test_of_several_caches_each_backend_has_the_first_that_it_serves() -> None:
    caches = [replace(CACHE, page_size=page_size) for page_size in (8, 32, 64)]
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}, page_sizes={64}), priority=30)
    register_backend("LARGE", fake_backend("LARGE", page_sizes={32, 64}), priority=20)
    selection = select_backend("AUTO", SPECS, caches, "cpu")
    assert (selection.name, selection.cache) == ("LARGE", caches[1])
    assert pickle.loads(pickle.dumps(selection)).cache == caches[1]
    assert select_backend("TORCH", SPECS, caches, "cpu").cache == caches[0]
    assert select_backend("TORCH", SPECS, CACHE, "cpu").cache == CACHE
    rows = {row["name"]: row for row in explain("AUTO", SPECS, caches, "cpu").to_dict()["backends"]}
    assert [rows[name]["page_size"] for name in ("TORCH", "LARGE", "NARROW")] == [8, 32, None]
    register_backend("HUGE", fake_backend("HUGE", page_sizes={128, 256}))
    with pytest.raises(Unsupported, match="page_size: got 8; supported: 128, 256"):
        select_backend("HUGE", SPECS, caches, "cpu")


def test_page_sizes_that_a_backend_prefers_come_first() -> None:
    caches = [replace(CACHE, page_size=page_size) for page_size in (8, 16, 32, 64)]
    backend = fake_backend("FOND", page_sizes={8, 16, 32})
    backend.preferred_page_sizes = classmethod(lambda cls, device: (64, 32, 16))  # type: ignore[method-assign,assignment]
    register_backend("FOND", backend, priority=20)
    assert select_backend("FOND", SPECS, caches, "cpu").cache == caches[2]
    assert select_backend("AUTO", SPECS, caches[:2], "cpu").cache == caches[1]
    assert select_backend("FOND", SPECS, caches[:1], "cpu").cache == caches[0], "nothing that was not offered"
    assert {get_backend("TORCH").preferred_page_sizes(device) for device in ("cpu", "cuda")} == {()}
    assert [get_backend("TORCH_MLA").preferred_page_sizes(device) for device in ("cpu", "cuda")] == [(), (64, 32)]


def test_explain_is_the_same_as_data() -> None:
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}), priority=20)
    register_backend("MISSING", "no_such_module:X", priority=30)
    explanation = explain("auto", SPECS, CACHE, "cpu")
    assert (explanation.chosen, explanation.reason) == ("TORCH", select("auto").reason)
    data = json.loads(json.dumps(explanation.to_dict()))
    rows = {row["name"]: row for row in data["backends"]}
    assert rows["TORCH"]["usable"]
    assert "no_such_module" in rows["MISSING"]["import_error"]
    assert rows["NARROW"]["rejections"][0] == {
        "code": "head_dim", "got": "80", "supported": "64", "hint": "Choose a backend that takes this head_dim.",
        "layers": ["second", "third"],
    }  # fmt: skip
    refused: Explanation = explain("narrow", SPECS, CACHE, "cpu")
    assert (refused.asked, refused.chosen) == ("NARROW", None)
    assert "head_dim: got 80" in refused.reason
    with pytest.raises(UnknownBackendError):
        explain("nothing", SPECS, CACHE, "cpu")


def test_layers_may_be_any_iterable() -> None:
    register_backend("NARROW", fake_backend("NARROW", head_dims={64}), priority=20)
    found = explain("AUTO", (spec for spec in SPECS.values()), CACHE, "cpu").verdicts
    assert {verdict.name: [r.layers for r in verdict.rejections] for verdict in found}["NARROW"] == [(1, 2), (1, 2)]


def test_options_are_validated_by_the_backends_own_model() -> None:
    register_backend("PLAIN", fake_backend("PLAIN"))
    register_backend("TUNED", fake_backend("TUNED"), options=Options)
    assert validate_options("plain", {}) is None
    assert validate_options("tuned", {}) == Options()
    assert validate_options("tuned", {"splits": "4"}) == Options(splits=4)
    assert validate_options("TORCH", {}) is not None
    with pytest.raises(ConfigError, match="PLAIN takes none; given: splits"):
        validate_options("PLAIN", {"splits": 4})
    with pytest.raises(ConfigError, match=r"backend_options.split \(from options of TUNED\).*backend_options.splits\?"):
        validate_options("TUNED", {"split": 4})


def test_a_named_backend_is_asked_with_its_options() -> None:
    class Odd(fake_backend("ODD")):  # type: ignore[misc]
        @classmethod
        def reject_set_up(cls, spec: Any, cache: KVCacheSpec, device: Any, options: Options | None) -> list[Rejection]:
            if options is None or cache.page_size >= options.splits:
                return []
            return [Rejection("page_size", str(cache.page_size), f"from {options.splits} on", "Set splits to less.")]

    register_backend("ODD", Odd, options=Options, priority=99)
    caches = [replace(CACHE, page_size=page_size) for page_size in (8, 32)]
    assert select_backend("ODD", SPECS, caches, "cpu").cache == caches[0]
    assert select_backend("odd", SPECS, caches, "cpu", options={"splits": 9}).cache == caches[1]
    with pytest.raises(Unsupported, match="page_size: got 8; supported: from 33 on"):
        select_backend("ODD", SPECS, caches, "cpu", options={"splits": 33})
    assert explain("ODD", SPECS, caches, "cpu", options={"splits": 33}).chosen is None
    assert explain("TORCH", SPECS, caches, "cpu", options={"graph_max_seq_len": 99}).chosen == "TORCH"
    assert select_backend("AUTO", SPECS, caches, "cpu", options={"splits": 33}).cache == caches[0]  # asked without
    with pytest.raises(ConfigError, match=r"backend_options\.split"):
        select_backend("ODD", SPECS, caches, "cpu", options={"split": 33})
    with pytest.raises(ValueError, match="no cache to serve"):
        select_backend("TORCH", SPECS, [], "cpu")


def test_selections_and_rows_pickle_and_backends_come_back_by_name() -> None:
    register_backend("LOCAL", fake_backend("LOCAL"))
    selection = select("LOCAL")
    again = pickle.loads(pickle.dumps(selection))
    assert again == selection
    assert again.backend is get_backend("LOCAL")
    assert pickle.loads(pickle.dumps(backends["TORCH"])) == backends["TORCH"]
    assert pickle.loads(pickle.dumps(get_backend("TORCH"))) is get_backend("TORCH")
