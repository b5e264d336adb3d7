"""What a library's file says that it was built with, and layers that a build which leaves kernels out refuses."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec
from attn_backends.backends.flash_attn.built import (
    Kernel,
    Kernels,
    everything,
    flash_attention_2,
    flash_attention_3,
    kernels_in,
)
from attn_backends.backends.flash_attn.fa2 import FlashAttn2, VllmFa2
from attn_backends.backends.flash_attn.fa3 import FlashAttnInterface, VllmFa3
from attn_backends.backends.flash_attn.provider import Provider
from attn_backends.backends.flash_attn.state import PROVIDERS
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.kit.base import KitBase
from tests.helpers.flash_attn_backends import emulated, register

F16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
NAMES = {F16: "6half_t", BF16: "10bfloat16_t", FP8: "12float_e4m3_t"}
SPEC = AttentionSpec(4, 2, 64, dtype=F16)
SMALL, LARGE = KVCacheSpec(8, 16), KVCacheSpec(8, 256)


def fa2_names(
    dims: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (F16, BF16), kinds: str = "13 21splitkv_"
) -> str:
    """As the compiler mangles them. Of head dims that are left out there are dispatchers, which raise."""
    names = ["_ZN5flash12run_mha_fwd_IN7cutlass6half_tELi96ELb0EEEvRNS_16Flash_fwd_paramsEP11CUstream_st"]
    for kind in kinds.split():
        digits, split = kind[:2], kind[2:]
        for dim in dims:
            for dtype in dtypes:
                traits = f"I23Flash_fwd_kernel_traitsILi{dim}ELi64ELi128ELi4ELb0ELb0EN7cutlass{NAMES[dtype]}E19Flash"
                names.append(f"_ZN5flash{digits}run_flash_{split}fwd{traits}_kernel_traitsE")
    return "\0".join(names) + "\0"


def fa3_names(dims: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (F16, BF16, FP8), without: str = "") -> str:
    flags = [f"{split}{paged}{cap}" for split in "01" for paged in "01" for cap in "01"]
    return "".join(
        f"_Z12run_mha_fwd_ILi90EN7cutlass{NAMES[dtype]}ELi{dim}ELi{dim_vo}ELb{f[0]}ELb{f[1]}ELb{f[2]}ELb1EEvR16Fl\0"
        for dtype in dtypes
        for dim, dim_vo in [*((dim, dim) for dim in dims), (192, 128)]
        for f in flags
        if f != without
    )


def library(file: Path, names: str) -> Path:
    """A shared library that holds nothing but names."""
    titles, table = b"\0.shstrtab\0.dynstr\0", b"\0" + names.encode()
    at = 64 + len(titles) + len(table)
    sections = [(0, 0, 0, 0), (1, 3, 64, len(titles)), (11, 3, 64 + len(titles), len(table))]
    header = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<QIHHHHHH", at, 0, 64, 0, 0, 64, len(sections), 1)
    lines = [
        struct.pack("<IIQQQQ", title, kind, 0, 0, start, size).ljust(64, b"\0") for title, kind, start, size in sections
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header.ljust(64, b"\0") + titles + table + b"".join(lines))
    return file


def dims_of(kernels: Kernels, dtype: torch.dtype, soft_cap: bool = True) -> list[int]:
    return sorted(kernel.head_dim for kernel in kernels if kernel.dtype is dtype and kernel.soft_cap == soft_cap)


def test_flash_attention_2_is_read(tmp_path: Path) -> None:
    found = kernels_in(library(tmp_path / "two.so", fa2_names((64, 128, 256))), flash_attention_2)
    assert dims_of(found, F16) == dims_of(found, BF16, False) == [64, 128, 256]
    assert not dims_of(found, FP8)


def test_flash_attention_2_without_kernels_for_pages_has_none(tmp_path: Path) -> None:
    for kinds in ("13", "21splitkv_"):
        assert not kernels_in(library(tmp_path / f"{kinds}.so", fa2_names((64,), kinds=kinds)), flash_attention_2)


def test_flash_attention_3_is_read(tmp_path: Path) -> None:
    found = kernels_in(library(tmp_path / "three.so", fa3_names((64, 128), (BF16, FP8))), flash_attention_3)
    assert dims_of(found, BF16) == dims_of(found, FP8, False) == [64, 128], "values that are narrower are other kernels"
    assert not dims_of(found, F16)


@pytest.mark.parametrize(("without", "left"), [("101", (True, False)), ("011", (True, False)), ("000", (False, True))])
def test_variants_of_flash_attention_3_that_are_left_out(without: str, left: tuple[bool, bool], tmp_path: Path) -> None:
    """Split, paged, soft cap: what lacks one of the first two is left out, with and without the third apart."""
    found = kernels_in(library(tmp_path / "three.so", fa3_names((64,), without=without)), flash_attention_3)
    assert (bool(dims_of(found, F16, False)), bool(dims_of(found, F16))) == left


def test_a_library_that_changes_is_read_anew(tmp_path: Path) -> None:
    file = library(tmp_path / "two.so", fa2_names((64,)))
    os.utime(file, ns=(1, 1))
    assert dims_of(kernels_in(file, flash_attention_2), F16) == [64]
    os.utime(library(file, fa2_names((128,))), ns=(2, 2))
    assert dims_of(kernels_in(file, flash_attention_2), F16) == [128]


def test_other_files_hold_none(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"\x7fELF")
    (tmp_path / "other").write_bytes(b"MZ" + bytes(200))
    for name in ("short", "other", "none"):
        assert not kernels_in(tmp_path / name, flash_attention_2)


FILES = {
    FlashAttn2: ("flash_attn_2_cuda.so", fa2_names((64, 128))),
    VllmFa2: ("_vllm_fa2_C.abi3.so", fa2_names((64, 128))),
    VllmFa3: ("_vllm_fa3_C.abi3.so", fa3_names((64, 96, 128))),
    FlashAttnInterface: ("flash_attn_3/_C.abi3.so", fa3_names((64, 96, 128))),
}


@pytest.mark.parametrize("kind", FILES)
def test_providers_find_their_library(kind: type[Provider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, names = FILES[kind]
    file = library(tmp_path / name, names)
    of_module = file if kind is FlashAttn2 else tmp_path / "interface.py"
    provider = kind()
    monkeypatch.setattr(kind, "modules", [SimpleNamespace(__file__=str(of_module))] * 2)
    assert provider.capabilities().head_dims == {64, 128}
    (found,) = provider.reject(replace(SPEC, head_dim=192, head_dim_vo=192), LARGE, torch.device("cpu"))[1:2]
    assert "192" in found.got
    assert str(file) in found.hint
    file.write_bytes(b"")
    (missing,) = kind().reject(SPEC, LARGE, torch.device("cpu"))
    assert missing.code == "provider"
    assert str(file) in missing.got


# A build that leaves kernels out.


def without(provider: type[Provider], *lacking: tuple[torch.dtype, int, bool]) -> Kernels:
    return everything(provider.kernel_dims) - {Kernel(*each) for each in lacking}


@pytest.mark.parametrize(
    ("kind", "lacking", "changes", "told"),
    [
        (FlashAttn2, [(BF16, 192, False)], {"head_dim": 192}, "head_dim: got 192; supported: .*128, *256"),
        (
            FlashAttn2,
            [(F16, 96, False)],
            {"head_dim": 80},
            "head_dim: got 80; supported: 64, 128, 192, 256.*has no kernels for it",
        ),
        (VllmFa3, [(F16, 128, False)], {"head_dim": 128}, "head_dim: got 128; supported: 64, 192, 256"),
        (VllmFa3, [(F16, 128, True)], {"logits_soft_cap": 9.0}, "soft_cap"),
        (VllmFa3, [(F16, dim, False) for dim in VllmFa3.kernel_dims], {}, "dtype: got float16; supported: bfloat16"),
        (VllmFa3, [(FP8, 256, True)], {"dtype": BF16, "cache_dtype": FP8}, "cache_dtype: got float8_e4m3fn"),
        (VllmFa3, [], {"head_dim": 96}, "head_dim: got 96; supported: 64, 128, 192, 256.*illegal instruction"),
        (VllmFa3, [], {"head_dim": 80}, "head_dim: got 80; supported: 64, 128, 192, 256.*illegal instruction"),
        (FlashAttnInterface, [], {"head_dim": 96}, "illegal instruction"),
    ],
)
def test_what_was_not_built_is_refused(
    kind: type[Provider], lacking: list[Any], changes: dict[str, Any], told: str
) -> None:
    wanted = {"head_dim_vo": changes.get("head_dim", 64), "cache_dtype": changes.get("dtype", F16), **changes}
    provider, spec = emulated(kind, without(kind, *lacking)), replace(SPEC, **wanted)
    cache = LARGE if kind is FlashAttn2 else SMALL
    found = "\n".join(map(str, provider.reject(spec, cache, torch.device("cpu"))))
    assert re.search(told, found.replace("\n", " ")), found
    assert not emulated(kind).reject(SPEC, cache, torch.device("cpu"))


def test_what_a_build_leaves_out_leaves_the_rest() -> None:
    can = emulated(VllmFa3, without(VllmFa3, (FP8, 64, False))).capabilities()
    assert (can.cache_dtypes, can.soft_cap, can.head_dims) == ({F16, BF16}, True, {64, 128, 192, 256})


register("FLASH_ATTN_CUT_EMULATED", emulated(FlashAttn2, without(FlashAttn2, (F16, 96, True), (F16, 96, False))))


class CutBuild(KitBase):
    """Without kernels of 96: it declares what is there, and calls nothing else."""

    backend_name = "FLASH_ATTN_CUT_EMULATED"
    dtypes = (F16,)


class TestHeadDimsOfCutBuild(CutBuild):
    def test_no_other_head_dims(self) -> None:
        assert self.can.head_dims == {64, 128, 192, 256}
        self.check(self.make_spec(head_dim=192), [BatchShape(seq_lens=(40, 31), query_lens=(1, 11))])


@pytest.mark.long
class TestCutBuild(CutBuild, BackendConformance):
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)
def test_libraries_that_are_here_can_be_read(provider: Provider) -> None:
    missing = provider.missing()
    if missing is not None:
        pytest.skip(str(missing))
    assert {64, 128, 256} <= (provider.capabilities().head_dims or set())
    assert (provider.built is None) == (provider.name == "flash_attn_4")
