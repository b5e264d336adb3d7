"""How our Triton kernels are launched: on which GPUs, when, to the kernel in front of them, and quickly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import IntEnum
from functools import cache, lru_cache, reduce
from inspect import Parameter, Signature
from itertools import chain
from operator import attrgetter, or_
from typing import Any, NamedTuple, Protocol, get_type_hints

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from attn_backends import machine
from attn_backends.machine import is_hip, is_hopper

INTERPRETED = bool(triton.knobs.runtime.interpret)
ALIGNED = 16  # of which kernels are told that addresses, in bytes, and other numbers are multiples
_SERVED_SINCE = (8, 0)  # compute capability
_TENSOR_ENGINE_SINCE = (9, 0)
_GLUON_TRIED = {(3, 6), (3, 7)}  # Triton's versions that compile our kernels for Hopper: Gluon may change with others
_RUN_TRIED = {(3, 6), (3, 7), (3, 9)}  # whose compiled kernels take what `start_compiled` gives their `run`
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


class Machine(NamedTuple):
    """What decides which kernels a device is given, and how they are compiled."""

    num_multiprocessors: int
    shared_memory: int  # bytes that one program can have
    has_tensor_engine: bool
    has_hopper_kernels: bool
    supports_pdl: bool


class Listing(Protocol):
    """Takes note of launches in their place (see `variants`)."""

    @property
    def machine(self) -> Machine: ...
    def add(self, kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None: ...


LISTING: ContextVar[Listing | None] = ContextVar("listing", default=None)  # where launches go instead of to a device


def machine_of(device: torch.device) -> Machine:
    return Machine(
        num_multiprocessors(device), shared_memory(device), has_tensor_engine(device), has_hopper_kernels(device),
        supports_pdl(device),
    )  # fmt: skip


def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; on a CPU a few, so that little work is split there too."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.num_multiprocessors
    return machine.num_multiprocessors(device, interpreted=2)


def shared_memory(device: torch.device) -> int:
    """Bytes that one program can have; where kernels are interpreted, a Hopper GPU's."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.shared_memory
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def has_tensor_engine(device: torch.device) -> bool:
    """Whether a GPU has a tensor memory accelerator, as Hopper and newer do. Interpreted kernels have."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.has_tensor_engine
    return device.type != "cuda" or (not is_hip() and torch.cuda.get_device_capability(device) >= _TENSOR_ENGINE_SINCE)


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels of ours run on a device: interpreted they do on any, else on NVIDIA's GPUs since Ampere."""
    if INTERPRETED or LISTING.get() is not None:
        return True
    return device.type == "cuda" and not is_hip() and torch.cuda.get_device_capability(device) >= _SERVED_SINCE


def untried_triton(device: torch.device) -> str:
    """Says that this version of Triton was not tried with the kernels for Hopper, where a GPU is one; else nothing."""
    if device.type != "cuda" or _TRITON in _GLUON_TRIED or not is_hopper(device):
        return ""
    tried = ", ".join(f"{major}.{minor}" for major, minor in sorted(_GLUON_TRIED))
    return (
        f"Triton {triton.__version__} was not tried with the kernels for Hopper ({tried} were): portable ones serve "
        "in their place, slower"
    )


def has_hopper_kernels(device: torch.device) -> bool:
    """Whether kernels that are written for Hopper, in Gluon, run on a device. None is interpreted."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.has_hopper_kernels
    return device.type == "cuda" and is_hopper(device) and _TRITON in _GLUON_TRIED


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel can start before the one in front of it has ended: by programmatic dependent launch."""
    listing = LISTING.get()
    return _supports_pdl(device) if listing is None else listing.machine.supports_pdl


@cache
def _supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and has_tensor_engine(device) and hasattr(cuda, "gdc_wait")


class Pdl(IntEnum):
    """When a kernel starts, by programmatic dependent launch, relative to the one in front of it."""

    OFF = 0  # once that has ended
    WAIT_AT_ONCE = 1  # before it has ended, to wait for it before it reads anything
    WAIT_FIRST = 2  # the same, but reads what was there before the one in front was launched
    WAIT_LAST = 3  # the same, and does not need what it writes: one program waits for it last, so that both have ended


WAIT_AT_ONCE, WAIT_FIRST, WAIT_LAST = (tl.constexpr(int(pdl)) for pdl in [*Pdl][1:])  # as kernels know them


@triton.jit
def launch_dependents():  # type: ignore[no-untyped-def]
    """Let the next kernel start once all programs came here, if it is launched so (Triton's `launch_pdl`)."""
    cuda.gdc_launch_dependents()


@triton.jit
def grid_wait_and_launch_dependents():  # type: ignore[no-untyped-def]
    """Wait for the kernel in front, then let the next one start, in every program of a kernel that starts early.

    It waits first: so what the next one finds, before it waits itself, is all but what this one writes.
    """
    grid_wait()
    launch_dependents()


@triton.jit
def acquire_fence():  # type: ignore[no-untyped-def]
    """Read anew, from here on, what kernels in front of the one beside which this one runs have written."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def grid_wait():  # type: ignore[no-untyped-def]
    """Wait until all that the kernel in front writes is there, in every program of a kernel that starts early."""
    cuda.gdc_wait()


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def operator(mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a launch a torch operator where kernels are interpreted.

    Where they are compiled it stays as it is: an operator takes longer to call than a kernel to launch.
    """

    def wrap(launch: Callable[..., None]) -> Callable[..., None]:
        if not INTERPRETED:
            return launch
        name = f"attn_backends::triton_{launch.__name__.strip('_')}"
        by_lists = _taking_lists(launch)
        made: Callable[..., None] = torch.library.custom_op(name, by_lists, mutates_args=mutates, device_types="cpu")
        return made

    return wrap


def _taking_lists(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch whose named tuples of numbers are lists: an operator's schema has no others."""
    hints = get_type_hints(launch)
    groups = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
    names = [name for name in hints if name != "return"]

    def by_lists(*given: Any) -> None:
        launch(*(groups[name](*value) if name in groups else value for name, value in zip(names, given, strict=True)))

    def annotation(name: str) -> Any:
        if name not in groups:
            return hints[name]
        return list[float] if float in get_type_hints(groups[name]).values() else list[int]

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation(name)) for name in names]
    by_lists.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return by_lists


_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # kernels, by all that Triton compiles them for; and of which
_MOST_COMPILED = 1024
_dtype_of = attrgetter("dtype")


class Fixed:
    """All numbers of a kernel's launches that do not vary from batch to batch, by named tuples and flat. A launch finds
    its compiled form by this object and not by the numbers: see `fixed_numbers`."""

    __slots__ = ("groups", "numbers")

    def __init__(self, groups: tuple[tuple[Any, ...], ...]) -> None:
        self.groups, self.numbers = groups, (*chain.from_iterable(groups),)


@lru_cache(maxsize=_MOST_COMPILED)
def _fixed(kernel_id: int, groups: tuple[tuple[Any, ...], ...]) -> Fixed:
    return Fixed(groups)


def fixed_numbers(kernel: Any, *groups: tuple[Any, ...]) -> Fixed:
    """What `launch` takes for `groups`: the same object for equal numbers. Keep it where the numbers come from."""
    return _fixed(id(kernel), groups)


def start_kernel(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> Any:
    """Launch a kernel by Triton itself, which looks for the compiled one and returns it; None where there is none."""
    if (listing := LISTING.get()) is not None:
        listing.add(kernel, given, options)
        return None
    return kernel[grid](*given, **options)


def start_compiled(compiled: Any, grid: tuple[int, ...], *given: Any) -> None:
    """Launch what Triton compiled. Its own `compiled[grid]` describes each launch for hooks first, a third of what it
    takes the host: so only where some profiler has hooks."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook  # chains of calls, or what was put in their place
    if _TRITON not in _RUN_TRIED or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[grid](*given)
        return
    compiled.run(*grid, current_stream(), compiled.function, compiled.packed_metadata, None, None, None, *given)


def current_stream() -> int:
    """The current device's stream, as a driver knows it."""
    device_of, stream_of = _driver_calls()
    return int(stream_of(device_of()))


@cache
def _driver_calls() -> tuple[Callable[[], int], Callable[[int], int]]:
    active = triton.runtime.driver.active
    device_of = active.get_current_device
    # A kernel was launched, so the device is there: torch need not look first.
    return torch._C._cuda_getDevice if device_of is torch.cuda.current_device else device_of, active.get_current_stream


def launch(
    kernel: Any, grid: int | tuple[int, ...], tensors: Sequence[torch.Tensor], varying: tuple[float, ...],
    groups: tuple[tuple[Any, ...], ...] | Fixed, warps: int, *, descriptors: tuple[Any, ...] = (),
    use_pdl: bool = False,
) -> None:  # fmt: skip
    """Launch a Triton kernel. What Triton does to find the compiled one takes the host several times as long as to
    launch it: once for all launches that differ in addresses and in `varying` alone.

    Args:
        kernel: its parameters are, in this order, `descriptors`, `tensors`, `varying` and `groups`.
        grid: programs, one number or as many as Triton takes.
        varying: numbers that differ from batch to batch. The kernel is not specialised for them, nor do integers need
            more than 32 bits.
        groups: all other numbers, by named tuples; or these of `fixed_numbers`.
        warps: of a program.
        descriptors: of some of the tensors, or None; what they are of follows from the others.
        use_pdl: the kernel starts before the one in front of it has ended, see `supports_pdl`.
    """
    grid = grid if isinstance(grid, tuple) else (grid,)
    numbers = groups.numbers if isinstance(groups, Fixed) else (*chain.from_iterable(groups),)
    # Not every version of Triton knows the word.
    options = {"num_warps": warps, "launch_pdl": True} if use_pdl else {"num_warps": warps}
    if INTERPRETED or LISTING.get() is not None:
        start_kernel(kernel, grid, *descriptors, *tensors, *varying, *numbers, **options)
        return
    addresses = [*map(torch.Tensor.data_ptr, tensors)]
    aligned: Any = not reduce(or_, addresses) % ALIGNED or tuple(address % ALIGNED == 0 for address in addresses)
    same = (groups,) if isinstance(groups, Fixed) else numbers
    form = (id(kernel), tensors[0].get_device(), warps, use_pdl, aligned, *map(_dtype_of, tensors), *same)
    found = _compiled.get(form)
    if found is not None:
        start_compiled(found[0], (*grid, 1, 1)[:3], *descriptors, *addresses, *varying, *numbers)
        return
    if len(_compiled) >= _MOST_COMPILED:
        _compiled.clear()
    _compiled[form] = kernel[grid](*descriptors, *tensors, *varying, *numbers, **options), kernel
