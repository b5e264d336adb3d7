"""AMD's GPUs: torch calls them cuda, and an MI300 reports capability 9.4, which is not Hopper's 9.0."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec, Unsupported, machine, select_backend
from attn_backends.interface import AttentionBackend
from attn_backends.kernels import launch
from attn_backends.registry import support
from attn_backends.registry.table import BUILT_IN, backends, get_class

GPU = torch.device("cuda")
PORTABLE = {"TORCH", "TORCH_MLA"}  # plain torch operations


@pytest.fixture
def _mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch for ROCm answers on one."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "AMD Instinct MI300X")


def fresh_machine() -> Any:
    """The module as it is imported by a process that has such a GPU."""
    spec = importlib.util.spec_from_file_location("fresh_machine", machine.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rejections(backend: type[AttentionBackend], cache_dtype: torch.dtype | None = None) -> list[Any]:
    spec: AttentionSpec = AttentionSpec(32, 8, 128, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    if backend.capabilities().mla:
        spec = MLASpec(16, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    return backend.reject(spec, KVCacheSpec(8, 64), GPU)


@pytest.mark.usefixtures("_mi300")
def test_capabilities_are_nvidias_numbers() -> None:
    assert machine.compute_capability(GPU) is None
    assert machine.has_gpu(GPU)
    assert not machine.is_hopper(GPU)
    assert not launch.has_tensor_engine(GPU)
    assert not launch.has_hopper_kernels(GPU)
    assert not launch.supports_pdl(GPU)
    assert not fresh_machine().HAS_TRITON


@pytest.mark.usefixtures("_mi300")
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_kernels_for_nvidia_are_refused_by_name(entry: Any, cache_dtype: torch.dtype | None) -> None:
    found = rejections(get_class(entry), cache_dtype)
    told = [str(each) for each in found if each.code == "device"]
    if entry.name in PORTABLE:
        assert told == []
    else:
        assert told == [
            "device: got AMD Instinct MI300X (ROCm/HIP 7.0.51831); supported: NVIDIA's GPUs (CUDA). "
            "On ROCm/HIP it has not been tried: use TORCH, or TORCH_MLA for MLA."
        ]
    assert not any(each.code == "compute_capability" for each in found)


@pytest.mark.usefixtures("_mi300")
@pytest.mark.parametrize("spec", [AttentionSpec(32, 8, 128, dtype=torch.float16), MLASpec(16, dtype=torch.bfloat16)])
def test_auto_takes_plain_torch(spec: AttentionSpec) -> None:
    selection = select_backend("AUTO", [spec], KVCacheSpec(8, 64), "cuda")
    assert selection.name == ("TORCH_MLA" if isinstance(spec, MLASpec) else "TORCH")
    assert "ROCm/HIP" in selection.reason


@pytest.mark.usefixtures("_mi300")
def test_a_named_backend_is_refused_before_its_package_is_asked_for() -> None:
    for name in ("FLASHINFER", "FLASH_ATTN"):
        with pytest.raises(Unsupported, match=r"On ROCm/HIP it has not been tried"):
            select_backend(name, [AttentionSpec(32, 8, 128, dtype=torch.float16)], KVCacheSpec(8, 64), "cuda")


@pytest.mark.usefixtures("_mi300")
def test_the_table_of_support_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "devices_here", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(support, "get_backend", lambda name: get_class(backends[name]))
    monkeypatch.setattr("attn_backends.kernels.launch.INTERPRETED", False)
    rows = {row.name: row for row in map(support.support, BUILT_IN)}
    assert {name for name, row in rows.items() if row.usable} == PORTABLE
    assert all("has not been tried" in (row.reason or "") for row in rows.values() if not row.usable)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_nvidias_gpus_are_told_by_their_numbers(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert machine.compute_capability(GPU) == capability
    assert machine.is_hopper(GPU) == (capability == (9, 0))
    codes = {each.code for each in rejections(get_class(backends["FLASHMLA"]))}
    assert codes == (set() if capability == (9, 0) else {"compute_capability"})
