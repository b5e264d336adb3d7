"""What this machine has: its devices, as backends ask of them, and the folder of files for the next start."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from attn_backends.validation import CacheFolderError

AnswerT = TypeVar("AnswerT")
Progress = Callable[[int, int, str], None]  # of work that takes long: how much is done, of how much, and its last part
# Kernels of ours stand beside torch operations. On ROCm/HIP they have not been tried, and torch's operations stay.
HAS_TRITON = find_spec("triton") is not None and torch.version.hip is None
_pretended: int | None = None  # multiprocessors, where kernels are interpreted


@contextmanager
def pretend_multiprocessors(count: int) -> Iterator[None]:
    """Within it a CPU, where Triton's kernels are interpreted, stands for a GPU of so many multiprocessors."""
    global _pretended
    before, _pretended = _pretended, count
    try:
        yield
    finally:
        _pretended = before


def num_multiprocessors(device: torch.device, interpreted: int | None = None) -> int:
    """Multiprocessors of a GPU. On a CPU those of an H200, which emulated kernels stand for; where kernels are
    interpreted `interpreted`, unless `pretend_multiprocessors` says otherwise."""
    if device.type != "cuda":
        return 132 if interpreted is None else _pretended or interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hip() -> bool:
    """Whether this torch is built for AMD's GPUs (ROCm/HIP), which it calls cuda too."""
    return torch.version.hip is not None


def gpu_name(device: torch.device | str) -> str | None:
    """Name of a GPU that is here, such as "NVIDIA H200"; None elsewhere."""
    return _of_gpu(torch.cuda.get_device_name, device)


def _of_gpu(ask: Callable[[Any], AnswerT], device: torch.device | str) -> AnswerT | None:
    if torch.device(device).type != "cuda":
        return None
    try:
        return ask(device)
    except (AssertionError, RuntimeError):  # a torch without CUDA, no GPU, or not so many
        return None


def cpu_model() -> str:
    """What this machine's CPU is called; empty where nothing says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def cpu_name() -> str:
    """What this machine's CPU is called, and how many cores it shows."""
    return f"{cpu_model() or platform.machine()}, {os.cpu_count()} cores"


def device_name(device: torch.device | str) -> str | None:
    """Name of what a device is, such as "NVIDIA H200": the GPU, or the CPU with its number of cores."""
    return cpu_name() if torch.device(device).type == "cpu" else gpu_name(device)


def has_gpu(device: torch.device | str) -> bool:
    """Whether `device` is a GPU that is here, NVIDIA's or AMD's."""
    return _of_gpu(torch.cuda.get_device_capability, device) is not None


def compute_capability(device: torch.device | str) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU that is here; None elsewhere.

    HIP reports numbers of its own by the same call: an MI300 reports 9.4, and is no Hopper GPU.
    """
    return None if is_hip() else _of_gpu(torch.cuda.get_device_capability, device)


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper GPUs run; a CPU, where kernels are emulated, is taken for one."""
    return device.type != "cuda" or (not is_hip() and torch.cuda.get_device_capability(device)[0] == 9)


def bytes_to_allocate(device: torch.device) -> int | None:
    """Most bytes that may be asked for: all that a CPU has, or what a GPU has left; None where nothing says it."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu" or not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= {*os.sysconf_names}:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_while_capturing(device: torch.device, backend_name: str) -> None:
    """Refuse to plan on the host inside a capture.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{backend_name} plans on the host, and a CUDA graph is being captured: call begin_forward before the "
            "capture, and capture the layers alone"
        )


_TO_TYPE = "set XDG_CACHE_HOME to a folder that can be written"


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/attn_backends`, or `~/.cache/attn_backends`.

    Raises:
        CacheFolderError: neither variable is set, and there is no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backends"
    except RuntimeError as error:
        raise CacheFolderError(f"there is no cache folder ({error}): {_TO_TYPE}") from error


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder inside `parent`, made if need be, that is removed at the end.

    Raises:
        CacheFolderError: nothing can be written there, or no longer.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        if isinstance(error, CacheFolderError):
            raise
        why = error.strerror or error
        raise CacheFolderError(f"the cache folder {parent} cannot be written ({why}): {_TO_TYPE}") from error
