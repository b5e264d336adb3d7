"""The entry point, over stand-ins for the three modules of vLLM that it reads."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attn_backends.adapters import engine_version
from attn_backends.adapters.engine_version import UntestedEngine
from attn_backends.adapters.vllm import plugin
from attn_backends.registry import UnknownBackendError, backends


class Members(dict[str, str]):
    """vLLM's enum of backends: names are members here."""

    @property
    def __members__(self) -> dict[str, str]:
        return self


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A vLLM of a version, on a CPU or not, that keeps what is registered."""
    members = Members({name: name for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA", "FLASH_ATTN", "CUSTOM")})
    state = SimpleNamespace(version="0.32.0+cpu", on_cpu=True, registered={})

    def register_backend(member: str, path: str) -> None:
        if member not in members:
            members[member] = member
        state.registered[member] = path

    registry: Any = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum, registry.register_backend = members, register_backend
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: state.on_cpu)
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    monkeypatch.setattr(engine_version, "version", lambda _: state.version)
    monkeypatch.setattr(plugin, "version", lambda _: state.version)
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.delenv(engine_version.ALLOW, raising=False)
    return state


def test_installed_alone_it_adds_names_and_replaces_nothing(vllm: SimpleNamespace) -> None:
    plugin.add_to_vllm()
    plugin.add_to_vllm()
    assert set(vllm.registered) == {f"AB_{name}" for name in backends}
    assert vllm.registered["AB_TRITON"] == "attn_backends.adapters.vllm.served.AB_TRITON"


def test_an_early_vllm_takes_no_names(vllm: SimpleNamespace) -> None:
    vllm.version = "0.31.1"
    plugin.add_to_vllm()
    assert vllm.registered == {}


@pytest.mark.parametrize(
    ("asked", "on_cpu", "taken"),
    [
        ("torch", True, {"CUSTOM", "CPU_ATTN"}),
        ("TORCH_MLA", True, {"CUSTOM", "CPU_MLA", "AMX_MLA"}),
        ("TORCH", False, {"CUSTOM"}),
    ],
)
def test_what_is_asked_for_serves_under_vllms_names(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: str, on_cpu: bool, taken: set[str]
) -> None:
    vllm.version, vllm.on_cpu = "0.26.0", on_cpu
    monkeypatch.setenv(plugin.VARIABLE, asked)
    plugin.add_to_vllm()
    assert vllm.registered == {name: f"attn_backends.adapters.vllm.served.{name}__{asked.upper()}" for name in taken}


def test_an_unknown_backend_is_refused_by_name(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "TRITTON")
    with pytest.raises(UnknownBackendError, match="TRITON"):
        plugin.add_to_vllm()


@pytest.mark.parametrize("version", ["0.25.3", "0.34.0", "1.0.0"])
def test_an_untested_version_is_refused_if_it_was_asked_for(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    vllm.version = version
    plugin.add_to_vllm()  # only a warning: vLLM is to work without us
    assert vllm.registered == {}
    monkeypatch.setenv(plugin.VARIABLE, "TORCH")
    with pytest.raises(UntestedEngine, match=f"is {version}"):
        plugin.add_to_vllm()
    monkeypatch.setenv(engine_version.ALLOW, "1")
    plugin.add_to_vllm()
    assert "CPU_ATTN" in vllm.registered


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.33.0+cpu"])
def test_versions_that_were_tried(vllm: SimpleNamespace, version: str) -> None:
    vllm.version = version
    plugin.add_to_vllm()
    assert plugin.vllm_version() == tuple(map(int, version.split(".")[:2]))


def test_importing_it_loads_no_torch() -> None:
    code = "import attn_backends.adapters.vllm.plugin, sys; print('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
