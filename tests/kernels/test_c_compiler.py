"""C is compiled once, kept, made anew where the kept file is broken, and done without where there is no compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.native import paged_decode, paged_prefill
from attn_backends.kernels import c_compiler
from attn_backends.kernels.c_compiler import CompileError, load
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, run_backend


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One function, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return ANSWER; }\n")
    return path


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "attn_backends" / "native").iterdir())


def test_compiled_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(source, {"ANSWER": 41}).answer() == 41
    assert load(source, {"ANSWER": 42}).answer() == 42
    assert len(kept(tmp_path)) == 2
    monkeypatch.setattr(c_compiler, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert load(source, {"ANSWER": 42}).answer() == 42


def test_another_header_is_another_library(source: Path, tmp_path: Path) -> None:
    header = tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    for answer in (1, 2):
        header.write_text(f"#define ANSWER {answer}\n")
        assert load(source, {}).answer() == answer
    assert len(kept(tmp_path)) == 2


def test_another_source_cpu_or_compiler_is_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source, {"ANSWER": 1})
    monkeypatch.setattr(c_compiler, "_cpu", lambda: "another")
    load(source, {"ANSWER": 1})
    monkeypatch.setenv("CC", "cc -DUNUSED")
    load(source, {"ANSWER": 1})
    source.write_text("int answer(void) { return ANSWER + 1; }\n")
    assert load(source, {"ANSWER": 1}).answer() == 2
    assert len(kept(tmp_path)) == 4


@pytest.mark.parametrize("rest", [b"", b"not a library", None])
def test_a_broken_file_is_made_anew(source: Path, tmp_path: Path, rest: bytes | None) -> None:
    load(source, {"ANSWER": 7})
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(whole[: len(whole) // 2] if rest is None else rest)
    assert load(source, {"ANSWER": 7}).answer() == 7
    assert len(path.read_bytes()) == len(whole)


def test_what_can_go_wrong(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="ANSWER"):
        load(source, {})
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    with pytest.raises(CompileError, match=r"no-such-compiler.*apt install"):
        load(source, {"ANSWER": 1})
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CompileError, match="false --version failed"):
        load(source, {"ANSWER": 1})
    monkeypatch.delenv("CC")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompileError, match="cannot write"):
        load(source, {"ANSWER": 1})


def test_without_a_compiler_torch_attends_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    for module in (paged_decode, paged_prefill):
        module._compiled.cache_clear()
    try:
        batch = random_batch(TorchBackend, AttentionSpec(4, 2, 16), (9, 30, 12), (1, 1, 5))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert_matches(run_backend(TorchBackend, batch), batch)
        assert not paged_decode.PagedDecode.serves(batch.spec, torch.device("cpu"))
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2  # once for each kernel
        assert all("plain torch" in each and "apt install gcc" in each for each in told)
    finally:
        for module in (paged_decode, paged_prefill):
            module._compiled.cache_clear()
