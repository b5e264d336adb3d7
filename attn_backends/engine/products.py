"""A step's matrix products, run again at the sizes of other steps.

cuBLAS chooses a kernel when it first sees sizes that are far from all before them, which takes it longer than most
products. Products alone show it those sizes while the engine loads (`python -m benchmarks engine warm_up`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul")  # aten's names


class Sized(NamedTuple):
    """A tensor of a product that is as long as the step is: made anew for each size."""

    shape: tuple[int, ...]
    axis: int  # the one that varies
    order: tuple[int, ...]  # axes from the largest stride to the smallest
    dtype: torch.dtype
    device: torch.device

    def empty(self, size: int) -> torch.Tensor:
        shape = [*self.shape]
        shape[self.axis] = size
        made = torch.empty([shape[axis] for axis in self.order], dtype=self.dtype, device=self.device)
        return made.permute([self.order.index(axis) for axis in range(len(shape))])


class Product(NamedTuple):
    """One call of the library."""

    operator: Any
    arguments: tuple[Any, ...]  # a `Sized` for each tensor that varies
    named: Mapping[str, Any]
    most: int  # the size of a step that it is run for, at most

    def run(self, size: int) -> None:
        arguments, named = tree_map(
            lambda given: given.empty(size) if isinstance(given, Sized) else given,
            (self.arguments, self.named), is_leaf=lambda given: isinstance(given, Sized),
        )  # fmt: skip
        self.operator(*arguments, **named)


class ProductRecorder(TorchDispatchMode):
    """Keeps a call of each product that runs while it is entered, and that has an axis of one of the sizes.

    Args:
        sizes: a size that no weight has, and the most of what it stands for: tokens, say, or sampled rows.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes
        self._found: dict[object, Product] = {}

    @property
    def products(self) -> list[Product]:
        return [*self._found.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self._keep(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _keep(self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [given for given in [*arguments, *named.values()] if isinstance(given, torch.Tensor)]
        found = next((size for size in self._sizes if any(size in tensor.shape for tensor in tensors)), None)
        if found is None:
            return
        varying = [tensor for tensor in tensors if found in tensor.shape]
        if len(varying) == len(tensors) or any(tensor.shape.count(found) > 1 for tensor in varying):
            return  # attention by hand: no operand is a weight, or logits have the size twice
        key = operator, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in self._found:
            arguments, named = tree_map(lambda given: _sized(given, found), (arguments, named))
            self._found[key] = Product(operator, arguments, named, self._sizes[found])


def _sized(given: Any, size: int) -> Any:
    if not isinstance(given, torch.Tensor) or size not in given.shape:
        return given
    strides = given.stride()
    order = sorted(range(given.dim()), key=lambda axis: -strides[axis])
    return Sized(tuple(given.shape), given.shape.index(size), tuple(order), given.dtype, given.device)


def sizes_up_to(most: int) -> Iterator[int]:
    """Sizes that differ by tiles of few rows. From 4,096 on a step lasts so long that another kernel hardly shows."""
    for first, end, step in ((1, 8, 1), (8, 1024, 8), (1024, 4096, 16), (4096, most, 128)):
        yield from range(first, min(end, most), step)
    yield most


def unlike(most: int, taken: set[int]) -> int:
    """The largest size up to `most` that is none of those taken; 0 if there is none."""
    return next((size for size in range(most, 1, -1) if size not in taken), 0)
