"""Whether interpreted kernels read only what a launch was given: out of bounds they find numbers too, and nothing else
tells."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray


def check_reads(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let kernels that a module's `launch` starts fail (InterpreterError) where they read outside of all tensors that
    they are given. Kernels of a GPU do not."""
    from triton.runtime import interpreter

    given: list[tuple[int, int]] = []
    load, launch = interpreter._interpreter.load, module.launch

    def checked(pointers: NDArray[np.uint64], mask: NDArray[np.bool_], *others: Any) -> Any:
        read = pointers[mask]
        inside = np.zeros(read.shape, bool)
        for first, end in given:
            inside |= (read >= first) & (read < end)
        assert not given or inside.all(), f"{(~inside).sum()} of {read.size} numbers are read outside of all tensors"
        return load(pointers, mask, *others)

    def launched(kernel: Any, grid: Any, tensors: Any, *numbers: Any, **options: Any) -> None:
        given[:] = map(_extent, tensors)
        launch(kernel, grid, tensors, *numbers, **options)
        given.clear()

    monkeypatch.setattr(interpreter._interpreter, "load", checked)
    monkeypatch.setattr(module, "launch", launched)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)
