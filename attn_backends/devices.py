"""What backends ask of the device that they run on."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

Progress = Callable[[int, int, str], None]  # of work that takes long: how much is done, of how much, and its last part
HAS_TRITON = find_spec("triton") is not None  # of kernels of ours that stand beside torch operations


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; on a CPU, where kernels are emulated, those of an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def compute_capability(device: torch.device | str) -> tuple[int, int] | None:
    """Of a GPU that is here; None elsewhere."""
    if torch.device(device).type != "cuda":
        return None
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # a torch without CUDA, no GPU, or not so many
        return None


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper GPUs run; a CPU, where kernels are emulated, is taken for one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


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
