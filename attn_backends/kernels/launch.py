"""How our Triton kernels are launched: on which GPUs, when, to the kernel in front of them, and quickly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache, reduce
from itertools import chain
from operator import attrgetter, or_
from threading import local
from typing import Any, NamedTuple, Protocol

import torch
import triton
from triton.language.extra import cuda

from attn_backends import machine
from attn_backends.kernels.driver import PreparedLaunch, prepare_launch
from attn_backends.machine import is_hip, is_hopper

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Dtypes of queries. Triton's interpreter multiplies bfloat16 as if it were integers.
FLOATS = frozenset({torch.float32, torch.float16} | (set() if INTERPRETED else {torch.bfloat16}))
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


# Torch takes longer to say what a GPU has than a step has for it: it is asked once.


@cache
def _capability(gpu: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(gpu)


@cache
def _multiprocessors(gpu: torch.device) -> int:
    return machine.num_multiprocessors(gpu)


@cache
def _shared_memory(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _gpu(device: torch.device) -> torch.device:
    """A GPU by its number."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; on a CPU a few, so that little work is split there too."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.num_multiprocessors
    if device.type != "cuda":
        return machine.num_multiprocessors(device, interpreted=2)
    return _multiprocessors(_gpu(device))


def shared_memory(device: torch.device) -> int:
    """Bytes that one program can have; where kernels are interpreted, a Hopper GPU's."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.shared_memory
    return _shared_memory(_gpu(device).index) if device.type == "cuda" else 227 << 10


def has_tensor_engine(device: torch.device) -> bool:
    """Whether a GPU has a tensor memory accelerator, as Hopper and newer do. Interpreted kernels have."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.has_tensor_engine
    return device.type != "cuda" or (not is_hip() and _capability(_gpu(device)) >= _TENSOR_ENGINE_SINCE)


def has_hopper_kernels(device: torch.device) -> bool:
    """Whether kernels that are written for Hopper, in Gluon, run on a device. None is interpreted."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.has_hopper_kernels
    is_gpu = device.type == "cuda" and not is_hip() and _TRITON in _GLUON_TRIED
    return is_gpu and _capability(_gpu(device))[0] == _TENSOR_ENGINE_SINCE[0]


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel can start before the one in front of it has ended: by programmatic dependent launch."""
    if (listing := LISTING.get()) is not None:
        return listing.machine.supports_pdl
    return device.type == "cuda" and has_tensor_engine(device) and hasattr(cuda, "gdc_wait")


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


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class KernelForm(NamedTuple):
    """What Triton compiled, and a launch of it by the driver itself, where that can be."""

    kernel: Any  # of which; it is kept, as forms have its identity
    compiled: Any
    prepared: PreparedLaunch | None


class _Forms(local):
    """A thread's kernels, by all that Triton compiles them for."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], KernelForm] = {}


class Recording(Protocol):
    """Takes note of launches beside what they start (see `repeats`)."""

    def add(
        self, found: KernelForm | None, grid: tuple[int, ...], tensors: Sequence[torch.Tensor],
        addresses: list[int], varying: tuple[float, ...], descriptors: tuple[Any, ...],
    ) -> None: ...  # fmt: skip
    def refuse(self) -> None: ...


RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)
_forms = _Forms()


def forms_of_thread() -> dict[tuple[Any, ...], KernelForm]:
    """The dict of the thread that asks, by which it is known. No other may start its launches."""
    return _forms.found


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
    if (recording := RECORDING.get()) is not None:
        recording.refuse()
    return kernel[grid](*given, **options)


def start_compiled(compiled: Any, grid: tuple[int, ...], *given: Any) -> None:
    """Launch what Triton compiled. Its own `compiled[grid]` describes each launch for hooks first, a third of what it
    takes the host: so only where some profiler has hooks."""
    if describes_launches():
        compiled[grid](*given)
        return
    compiled.run(*grid, current_stream(), compiled.function, compiled.packed_metadata, None, None, None, *given)


def describes_launches() -> bool:
    """Whether launches are Triton's alone: some profiler has hooks, or no other way was tried with its version."""
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook  # chains of calls, or what was put in their place
    return _TRITON not in _RUN_TRIED or bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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
    use_pdl: bool = False, most_registers: int | None = None,
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
        most_registers: of a thread; None: as many as the kernel wants. It follows from `groups`.
    """
    grid = grid if isinstance(grid, tuple) else (grid,)
    numbers = groups.numbers if isinstance(groups, Fixed) else (*chain.from_iterable(groups),)
    # Not every version of Triton knows the word.
    options = {"num_warps": warps, "launch_pdl": True} if use_pdl else {"num_warps": warps}
    if most_registers:
        options["maxnreg"] = most_registers
    if INTERPRETED or LISTING.get() is not None:
        start_kernel(kernel, grid, *descriptors, *tensors, *varying, *numbers, **options)
        return
    addresses = [*map(torch.Tensor.data_ptr, tensors)]
    aligned: Any = not reduce(or_, addresses) % ALIGNED or tuple(address % ALIGNED == 0 for address in addresses)
    same = (groups,) if isinstance(groups, Fixed) else numbers
    form = (id(kernel), tensors[0].get_device(), warps, use_pdl, aligned, *map(_dtype_of, tensors), *same)
    found, whole = _forms.found.get(form), (*grid, 1, 1)[:3]
    if found is None:
        compiled = kernel[grid](*descriptors, *tensors, *varying, *numbers, **options)
        _keep(form, kernel, compiled, (descriptors, tensors, varying, numbers))
    elif found.prepared is None or describes_launches():
        start_compiled(found.compiled, whole, *descriptors, *addresses, *varying, *numbers)
    else:
        bases = [0 if each is None else each.base.data_ptr() for each in descriptors]
        words = found.prepared.as_words(varying)
        found.prepared.start(whole, current_stream(), addresses, words, descriptors, bases)
    if (recording := RECORDING.get()) is not None:
        recording.add(found, whole, tensors, addresses, varying, descriptors)


def _keep(form: tuple[Any, ...], kernel: Any, compiled: Any, given: tuple[Sequence[Any], ...]) -> None:
    """Find it by itself from now on."""
    prepared = prepare_launch(compiled, *given) if _TRITON in _RUN_TRIED else None
    if len(_forms.found) >= _MOST_COMPILED:
        _forms.found.clear()
    _forms.found[form] = KernelForm(kernel, compiled, prepared)
