"""Our own backends pass lint: on a CPU, emulated, interpreted, and the example plugin; with their options traced."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from attn_backends.registry import get_backend, get_entry
from attn_backends.registry.table import import_target
from attn_backends.testing.lint.run import LintReport, lint_backend
from attn_backends.testing.lint.subject import Subject
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

PLUGIN = Path(__file__).parents[3] / "examples" / "plugin"
EMULATED = {  # the module that registers each
    "FLASHINFER_EMULATED": "flashinfer_emulated",
    "FLASH_ATTN_FLASH_ATTN_EMULATED": "flash_attn_backends",
    "FLASHMLA_EMULATED": "flashmla_emulated",
    "FLASHINFER_MLA_EMULATED": "flashinfer_mla_emulated",
    "FLASH_ATTN_MLA_EMULATED": "flash_attn_mla_emulated",
}
MORE = (
    "FLASHMLA_EMULATED_OLDER", "FLASH_ATTN_MLA_EMULATED_INTERFACE", "FLASH_ATTN_FLASH_ATTN_INTERFACE_EMULATED",
    "FLASH_ATTN_VLLM_FA2_EMULATED", "FLASH_ATTN_VLLM_FA3_EMULATED", "FLASH_ATTN_FLASH_ATTN_4_EMULATED",
)  # fmt: skip


def lint(name: str, seed: int = 0) -> LintReport:
    options = get_entry(name).options
    model = import_target(options) if isinstance(options, str) else options
    return lint_backend(Subject(get_backend(name), seed=seed), model)


@pytest.fixture(autouse=True)
def _registered() -> None:
    for module in {*EMULATED.values()}:
        importlib.import_module(f"tests.helpers.{module}")


@pytest.mark.parametrize("name", ["TORCH", "TORCH_MLA", *EMULATED])
@pytest.mark.sampled
def test_a_backend_of_ours_passes(name: str) -> None:
    assert [*map(str, lint(name).findings)] == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["TORCH", "TORCH_MLA", *EMULATED, *MORE])
def test_it_passes_with_other_seeds(name: str, seed: int) -> None:
    assert [*map(str, lint(name, seed).findings)] == []


def test_the_plugin_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN)
    importlib.import_module("attn_backends_naive")
    try:
        assert [*map(str, lint("NAIVE").findings)] == []
    finally:
        del sys.modules["attn_backends_naive"]


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__, "triton")


@only_interpreted
@pytest.mark.parametrize("name", ["TRITON", "TRITON_MLA"])
def test_triton_passes(name: str) -> None:
    assert [*map(str, lint(name).findings)] == []
