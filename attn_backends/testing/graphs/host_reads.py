"""Finds reads of the device on the host: what a CUDA graph cannot capture, and what a step must not wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.testing.graphs.reachable import address, flat, is_host_path, tensors_of


class GraphViolation(RuntimeError):
    """Something that a captured graph cannot do, or that would make its replay wrong. `found` has one line for each."""

    def __init__(self, *found: str) -> None:
        super().__init__("\n  ".join(found))
        self.found = found


# On a CPU these reach no operation that a dispatch mode could see, or do so under another name.
_METHODS: dict[Any, str] = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__",
                 "__complex__", "__contains__")
}  # fmt: skip
_UPLOADS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
# Operations whose result, or the shape of it, the host has to know.
_OPS = frozenset(
    {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
     "unique_consecutive", "bincount"}
)  # fmt: skip
_MASKS = (torch.bool, torch.uint8)


def host_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The name of an operation that reads the device on the host; None for any other."""
    name = func.overloadpacket.__name__
    if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], torch.Tensor):
        return f"{func} without output_size"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masked = any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in args[1])
        # One value under a mask is a masked_fill_, which needs no count of the mask.
        if masked and (name == "index" or args[2].numel() != 1):
            return f"{func} with a boolean mask"
    return str(func) if name in _OPS else None


class PythonReads(TorchFunctionMode):
    """Calls `on_read(name, tensor)` for `Tensor.tolist` and the like, `on_upload(name)` for `torch.tensor` and its."""

    def __init__(
        self, on_read: Callable[[str, torch.Tensor], None], on_upload: Callable[[str], None] = lambda name: None
    ) -> None:
        super().__init__()
        self.on_read = on_read
        self.on_upload = on_upload

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            self.on_read(_METHODS[func], args[0])
        elif func in _UPLOADS:
            self.on_upload(f"torch.{func.__name__}")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Hands every operation to `operation`, in its smallest parts also under `torch.inference_mode()`.

    A custom operation that is registered for a device (`device_types="cpu"`) is a kernel, and comes whole. One that is
    registered for all of them is looked into.
    """

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Without autograd a composite operation comes whole, and a host read within it would not be seen.
        with self:
            results = func.decompose(*args, **kwargs)
            if results is NotImplemented and func.namespace != "aten" and _is_for_all_devices(func):
                results = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        return self.operation(func, args, kwargs) if results is NotImplemented else results


def _is_for_all_devices(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd"))


def tensors_in(*values: Any) -> list[torch.Tensor]:
    return [value for value in flat(values) if isinstance(value, torch.Tensor)]


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes, by its schema."""
    schema = func._schema.arguments
    given = [args[i] if i < len(args) else kwargs.get(argument.name) for i, argument in enumerate(schema)]
    changed = [value for value, arg in zip(given, schema, strict=True) if arg.alias_info and arg.alias_info.is_write]
    return tensors_in(*changed)


@dataclass
class HostReads:
    """What `forbid_host_reads` saw."""

    reads: list[str] = field(default_factory=list)  # with `count=True`; without, the first one raised
    allocations: list[str] = field(default_factory=list)  # operations that made new storage, with its shape and dtype


class _Sides:
    """Which tensors are the device's. On a CPU: those that were told, and whatever is computed from them."""

    def __init__(self, device: torch.device, objects: Sequence[object]) -> None:
        self.device = device
        told = tensors_of(objects)
        self.host = {id(tensor): tensor for path, tensor in told.items() if is_host_path(path)}
        # On a CPU the two halves of a batch share memory: then a tensor is known by itself alone.
        self.host_addresses = {address(tensor) for tensor in self.host.values()} | {0}
        self.ids: dict[int, torch.Tensor] = {}
        self.addresses: set[int] = set()
        for path, tensor in told.items():
            if not is_host_path(path):
                self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        self.ids[id(tensor)] = tensor
        self.addresses |= {address(tensor)} - self.host_addresses

    def on_device(self, tensor: torch.Tensor) -> bool:
        if self.device.type != "cpu":
            return tensor.device.type == self.device.type
        return id(tensor) in self.ids or address(tensor) in self.addresses

    def on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != self.device.type if self.device.type != "cpu" else id(tensor) in self.host


class _Watch(Operations):
    def __init__(self, sides: _Sides, seen: HostReads, on_read: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sides = sides
        self.seen = seen
        self.on_read = on_read

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given, changed = tensors_in(args, *kwargs.values()), written(func, args, kwargs)
        read = [tensor for tensor in given if self.sides.on_device(tensor) and all(tensor is not c for c in changed)]
        name = host_read(func, args, kwargs)
        if name is not None and read:
            self.on_read(name, read[0])
        results = func(*args, **kwargs)
        made = tensors_in(results)
        if read and any(map(self.sides.on_host, [*made, *changed])):
            self.on_read(f"{func}, a copy to the host,", read[0])
        elif read:
            for tensor in (*made, *changed):
                self.sides.add(tensor)
        before = {0, *map(address, given)}
        self.seen.allocations += [f"{func} {list(t.shape)} {t.dtype}" for t in made if address(t) not in before]
        return results


@contextmanager
def forbid_host_reads(
    device: torch.device | str, objects: Sequence[object] = (), *, count: bool = False
) -> Iterator[HostReads]:
    """Within it, reading a device tensor on the host is an error.

    On CUDA it sets `torch.cuda.set_sync_debug_mode("error")` besides. On a CPU, where host and device tensors look
    alike, the device's are all tensors in `objects` but those named `…_cpu`, and whatever is computed from them; there
    `.to("cpu")` looks like `.to(device)` and is let pass.

    Args:
        objects: what to walk for tensors; used on a CPU alone.
        count: put reads into the result's `reads` instead of raising.

    Raises:
        GraphViolation: at the first read; says which operation. On CUDA a RuntimeError if torch saw it first.
    """
    device = torch.device(device)
    seen, sides = HostReads(), _Sides(device, objects)

    def on_read(name: str, tensor: torch.Tensor) -> None:
        if sides.on_device(tensor):
            told = f"{name} reads {list(tensor.shape)} {tensor.dtype} of the device on the host"
            if not count:
                raise GraphViolation(f"{told}: keep a host copy (`…_cpu`) from where the value was made")
            seen.reads.append(told)

    with _cuda_sync_fails(device, not count), PythonReads(on_read), _Watch(sides, seen, on_read):
        yield seen


@contextmanager
def _cuda_sync_fails(device: torch.device, wanted: bool) -> Iterator[None]:
    if device.type != "cuda" or not wanted:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
