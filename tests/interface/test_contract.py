"""The contract's version: what is refused, in which words, everywhere that a backend is named; and its changelog."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.testing

import attn_backends
from attn_backends.cli.app import app
from attn_backends.interface import contract
from attn_backends.interface.contract import RELEASES, ContractMismatch, ContractRelease, Version, check_contract
from attn_backends.registry import (
    BackendImportError,
    backends,
    explain,
    get_backend,
    get_entry,
    register_backend,
    select_backend,
    table,
)
from attn_backends.registry.support import support
from attn_backends.registry.table import BUILT_IN, get_class
from attn_backends.spec import AttentionSpec, KVCacheSpec
from benchmarks.docs import contract as page
from tests.helpers.fake_backends import fake_backend, install_plugin

LATER = (  # a history that a later package may have
    ContractRelease((2, 1), "2028-03-01", added=("Builders may say how long they take.",)),
    ContractRelease(
        (2, 0), "2028-01-01", added=("`attend` takes a step table.",), removed=("`csr` is gone: read `page_table`.",)
    ),
    ContractRelease((1, 3), "2027-05-01", deprecated=("`csr` is gone: read `page_table`.",)),
    *RELEASES,
)
PLUGIN = """
from attn_backends import register_backend
from tests.helpers.fake_backends import fake_backend
Fake = fake_backend({name!r}, module=__name__)
{declared}
register_backend({name!r}, priority=90)(Fake)
"""
SPECS, CACHE = [AttentionSpec(4, 2, 64)], KVCacheSpec(4)


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_classes", {})
    monkeypatch.setattr(table, "_rows", functools.cache(table._rows.__wrapped__))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("foreign_")]:
        del sys.modules[name]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has contract 2.1."""
    monkeypatch.setattr(contract, "RELEASES", LATER)
    monkeypatch.setattr(contract, "CONTRACT", LATER[0].version)


def install(site: Path, declared: str) -> None:
    source = PLUGIN.format(name="FOREIGN", declared=declared)
    install_plugin(site, "foreign_kernels", "FOREIGN = foreign_kernels:Fake", foreign_kernels=source)


def test_the_newest_release_is_the_contract() -> None:
    assert attn_backends.CONTRACT == contract.CONTRACT == RELEASES[0].version
    versions = [release.version for release in RELEASES]
    assert versions == sorted(set(versions), reverse=True)
    assert [release.date for release in RELEASES] == sorted((release.date for release in RELEASES), reverse=True)


def test_the_docs_page_has_the_changelog() -> None:
    assert page.PAGE.read_text() == page.page(page.PAGE.read_text()), "run make pages"
    assert all(f"### {'.'.join(map(str, release.version))} " in page.PAGE.read_text() for release in RELEASES)


def changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What was added to a surface, and what is gone or another: names, and members as Class.member."""
    flat = [
        {(f"{name}.{member}" if member else name): told
         for name, members in names.items()
         for member, told in ({"": members} if isinstance(members, str) else {"": "", **members}).items()}
        for names in (before, after)
    ]  # fmt: skip
    added = sorted(flat[1].keys() - flat[0].keys())
    return added, sorted(name for name, told in flat[0].items() if flat[1].get(name) != told)


def test_what_the_contract_covers_changes_with_its_version() -> None:
    """While a version is not released, `make pages` takes what has changed into it."""
    kept = json.loads(page.SURFACE.read_text())
    assert tuple(kept["version"]) == contract.CONTRACT, "run make pages"
    added, others = changed(kept["names"], page.surface()["names"])
    assert [*added, *others] == [], (
        f"the contract changes: added {added}; gone or another {others}. Once {contract.CONTRACT} is released, that is "
        "a new version: raise CONTRACT (a minor for what is added with a default, else a major), say so in RELEASES, "
        "and run make pages"
    )


def test_a_change_of_the_surface_shows() -> None:
    names = page.surface()["names"]
    more = {**names, "Limits": {**names["Limits"], "max_images": "int = 0"}}
    assert changed(names, more) == (["Limits.max_images"], [])
    assert changed(more, names) == ([], ["Limits.max_images"])
    other = {**names, "get_backend": "(name: str, device: str) -> object"}
    assert changed(names, other) == ([], ["get_backend"])
    assert {"AttentionImpl", "CommonAttentionMetadata", "Plans", "select_backend"} <= set(names)
    assert "attend" in names["AttentionImpl"]
    assert names["CudaGraphSupport"]["ALWAYS"] == "3"


def broken_promises(releases: tuple[ContractRelease, ...]) -> list[str]:
    """What a release takes away that was not deprecated, in an earlier major, for half a year; and majors too soon."""
    majors = [date.fromisoformat(release.date) for release in releases if release.version[1] == 0]
    found = [f"major of {new}" for new, old in pairwise(majors) if (new - old).days < 365]
    for release in releases:
        for sentence in release.removed:
            since = [each.date for each in releases
                     if sentence in each.deprecated and each.version[0] < release.version[0]]  # fmt: skip
            days = [(date.fromisoformat(release.date) - date.fromisoformat(each)).days for each in since]
            if release.version[1] or max(days, default=0) < 180:
                found.append(f"{release.version}: {sentence}")
    return found


def test_what_goes_was_deprecated_for_half_a_year() -> None:
    assert broken_promises(RELEASES) == broken_promises(LATER) == []
    gone = ("`csr` is gone: read `page_table`.",)
    assert broken_promises((ContractRelease((2, 0), "2028-01-01", removed=gone),)), "never deprecated"
    assert broken_promises((ContractRelease((1, 4), "2028-01-01", removed=gone), *LATER[2:])), "in a minor"
    assert broken_promises((ContractRelease((2, 0), "2027-08-01", removed=gone), *LATER[2:])), "too soon"
    assert broken_promises((ContractRelease((3, 0), "2028-09-01"), *LATER)), "two majors in a year"


@pytest.mark.parametrize("written_for", [(2, 0), (2, 1)])
def test_the_same_major_and_an_older_minor_work(later: None, written_for: Version) -> None:
    check_contract("MINE", written_for)


@pytest.mark.parametrize(
    ("written_for", "words"),
    [
        ((1, 0), ["contract 1.0", "has 2.1", "2.0: `csr` is gone: read `page_table`; 2.0: `attend` takes", "2.x"]),
        ((1, 9), ["contract 1.9", "has 2.1", "`csr` is gone", "a release of it for contract 2.x"]),
        ((2, 2), ["contract 2.2", "has 2.1", "pip install --upgrade attn-backends"]),
        ((3, 0), ["contract 3.0", "has 2.1", "pip install --upgrade attn-backends"]),
        (None, ["does not say which version", "contract = (2, 1)", "conformance kit"]),
    ],
)
def test_others_are_refused_by_name_with_what_changed(later: None, written_for: Version, words: list[str]) -> None:
    with pytest.raises(ContractMismatch) as refusal:
        check_contract("the adapter to THEIRS", written_for)
    assert str(refusal.value).startswith("the adapter to THEIRS")
    assert [word for word in words if word not in str(refusal.value)] == []
    assert "Builders may say" not in str(refusal.value), "what a minor adds is no reason"


@pytest.mark.parametrize("nonsense", ["1.0", 1.0, (1,), (1, "0"), (True, 0), [1, 0]])
def test_what_is_no_version_is_said(nonsense: Any) -> None:
    with pytest.raises(TypeError, match=r"MINE: contract is .*; it must be a pair of numbers, such as \(1, 1\)"):
        check_contract("MINE", nonsense)


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_built_in_backends_are_up_to_date(entry: table.BackendEntry) -> None:
    assert get_class(entry).contract == contract.CONTRACT


MISMATCHES = [
    ("Fake.contract = (2, 0)", "was written for contract 2.0, and this attn_backends has 1.1", "--upgrade"),
    ("Fake.contract = (1, 7)", "was written for contract 1.7, and this attn_backends has 1.1", "--upgrade"),
    ("Fake.contract = (0, 4)", "What changed: 1.0: A backend's class declares `contract`", "a release of it"),
    ("del Fake.contract", "does not say which version of attn_backends' contract", "contract = (1, 1)"),
]


@pytest.mark.parametrize(("declared", "reason", "fix"), MISMATCHES, ids=[each[0] for each in MISMATCHES])
def test_a_third_partys_backend_of_another_contract(
    site: Path, caplog: pytest.LogCaptureFixture, declared: str, reason: str, fix: str
) -> None:
    """By name it is refused; everybody else goes on without it, and says why."""
    install(site, declared)
    with pytest.raises(BackendImportError) as refusal:
        get_backend("foreign")
    assert "backend FOREIGN" in str(refusal.value)
    assert "foreign_kernels:Fake" in str(refusal.value)
    assert reason in str(refusal.value)
    assert fix in refusal.value.fix
    with pytest.raises(ImportError, match="FOREIGN"):
        select_backend("FOREIGN", SPECS, CACHE, "cpu")
    row = support(get_entry("FOREIGN"))
    assert not row.usable
    assert reason in str(row.reason)
    assert fix in str(row.fix)
    chosen = select_backend("AUTO", SPECS, CACHE, "cpu")
    assert chosen.name == "TORCH"
    assert reason in chosen.reason, "AUTO says why it passed over the backend of the highest priority"
    assert backends["FOREIGN"].priority == 90
    [verdict] = [each for each in explain("AUTO", SPECS, CACHE, "cpu").verdicts if each.name == "FOREIGN"]
    assert reason in str(verdict.import_error)


def test_commands_show_the_refusal(site: Path) -> None:
    install(site, "Fake.contract = (2, 0)")
    run = typer.testing.CliRunner().invoke
    listed = json.loads(run(app, ["list", "--json"]).output)
    assert "contract 2.0" in next(row for row in listed if row["name"] == "FOREIGN")["reason"]
    doctor = run(app, ["doctor", "FOREIGN"])
    assert doctor.exit_code == 1
    assert "written for contract 2.0" in " ".join(doctor.output.split())


def test_registering_checks_too() -> None:
    newer = fake_backend("NEWER")
    newer.contract = (9, 0)
    with pytest.raises(ContractMismatch, match=r"fake_backends:Fake was written for contract 9\.0"):
        register_backend("NEWER", newer)
    assert "NEWER" not in backends


def test_a_backend_of_an_older_minor_serves(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "CONTRACT", (1, 4))
    install(site, "Fake.contract = (1, 0)")
    assert select_backend("AUTO", SPECS, CACHE, "cpu").name == "FOREIGN"
