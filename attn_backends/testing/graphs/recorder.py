"""Records the operations that a function runs, and runs them again on the tensors that they ran on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_backends.testing.graphs.host_reads import (
    GraphViolation,
    Operations,
    PythonReads,
    host_read,
    tensors_in,
    written,
)
from attn_backends.testing.graphs.reachable import Place, address, flat
from attn_backends.testing.guards.band import EMPTY, where_in_code

# As an index it is outside any pool of a test; as a length or a loop's bound it still ends.
WRONG_INTEGER = 1_000_003


@dataclass(frozen=True)
class RecordedOp:
    """One operation with the very tensors that it was given, and those that it made."""

    func: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, torch.Tensor], ...]  # (place among the results, the result at capture)

    def run(self) -> None:
        """Run it again. A new result goes where the first one lies, so whatever views that stays valid."""
        results = list(flat(self.func(*self.args, **self.kwargs)))
        for index, first in self.made:
            first.copy_(results[index])


@dataclass(frozen=True)
class EagerCall:
    """What runs between two pieces of a graph, as plain Python at every replay."""

    run: Callable[[], None]


@dataclass
class Input:
    """Storage that operations use and none of them made."""

    where: str  # the first use: operation, tensor, line of code
    is_written: bool = False
    tensors: dict[Place, torch.Tensor] = field(default_factory=dict)  # as they are used


class Recorder(Operations):
    """`with recorder.python, recorder:` records; what the host would have to wait for is a `GraphViolation`.

    Attributes:
        python: sees what is asked of tensors in Python and reaches no operation.
        ops: in order, without views and allocations, which do nothing at replay.
        made: storage by address, made by an operation.
        inputs: storage by address, used and not made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.python = PythonReads(self._refuse_read, self._refuse_upload)
        self.ops: list[RecordedOp | EagerCall] = []
        self.made: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, Input] = {}
        self._paused = False
        self._constants: dict[int, torch.Tensor] = {}
        self._before: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}

    def cut(self, eager: Callable[[], None]) -> None:
        """Run something now that is not recorded but called again at its place."""
        self._paused = True
        try:
            eager()
        finally:
            self._paused = False
        self.ops.append(EagerCall(eager))

    def undo(self) -> None:
        """Put back what operations wrote to their inputs: capturing runs nothing on a GPU."""
        for tensor, content in reversed(self._before.values()):  # they may overlap
            tensor.copy_(content)
        self._before.clear()

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if (read := host_read(func, args, kwargs)) is not None:
            self._refuse_read(read, next(iter(tensors_in(args))))
        if name == "lift_fresh" and args[0].dim():
            self._refuse_upload(f"{func} {list(args[0].shape)}")
        given, changed = tensors_in(args, *kwargs.values()), written(func, args, kwargs)
        for tensor in changed:
            start, place = address(tensor), Place.of(tensor)
            if start > 0 and start not in self.made and place not in self._before:
                self._before[place] = (tensor, tensor.clone())
        results = func(*args, **kwargs)
        if name == "lift_fresh":  # a Python number that an operation was given as a tensor: baked in
            self._constants[address(results)] = results
        old = {0, *map(address, given)}
        made = tuple(
            (i, t) for i, t in enumerate(flat(results)) if isinstance(t, torch.Tensor) and address(t) not in old
        )
        self._note_made(func, [tensor for _, tensor in made])
        if (made and name not in EMPTY) or changed:
            self._note_inputs(func, given, changed)
            self.ops.append(RecordedOp(func, tuple(args), kwargs, made))
        return results

    def _note_made(self, func: Any, made: Sequence[torch.Tensor]) -> None:
        for tensor in made:
            if tensor.layout is not torch.strided:
                raise GraphViolation(f"{func} makes a tensor in oneDNN's own format: make it before capture")
            self.made[address(tensor)] = tensor

    def _note_inputs(self, func: Any, given: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
        for i, tensor in enumerate(given):
            start = address(tensor)
            if start and start not in self.made and start not in self._constants:
                if start not in self.inputs:
                    what = f"tensor {i} of {func}, {list(tensor.shape)} {tensor.dtype}"
                    self.inputs[start] = Input(f"{what}, in {where_in_code()}")
                self.inputs[start].tensors[Place.of(tensor)] = tensor
                self.inputs[start].is_written |= any(tensor is other for other in changed)

    def _refuse_read(self, name: str, tensor: torch.Tensor) -> None:
        if self._paused:
            return
        raise GraphViolation(
            f"{name} reads a tensor {list(tensor.shape)} {tensor.dtype} on the host while a graph is captured, in "
            f"{where_in_code()}: read it in begin_forward from a host copy, or compute with it on the device"
        )

    def _refuse_upload(self, name: str) -> None:
        if self._paused:
            return
        raise GraphViolation(
            f"{name} makes a tensor of values on the host while a graph is captured, in {where_in_code()}: make it "
            "before, keep it in the state, and fill it in begin_forward"
        )


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with what shows: NaN, an index outside any pool, True; bytes that are NaN as any float."""
    if tensor.layout is not torch.strided:
        return
    if (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1:
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    elif tensor.itemsize == 1:
        tensor.view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(min(WRONG_INTEGER, torch.iinfo(tensor.dtype).max))
