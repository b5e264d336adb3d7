"""Kernels compiled before they are needed: launches are listed in place of being made, and what they would run is
compiled side by side.

The list comes from the code that launches, given tensors without memory (torch's `meta` device), so that there are no
second rules for what is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import torch
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITCallable

from attn_backends.kernels.launch import ALIGNED, LISTING, Machine
from attn_backends.machine import Progress

Key = tuple[Any, ...]


class Variant(NamedTuple):
    """One compiled form of a kernel, by arguments of a launch that wants it."""

    kernel: Any
    given: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def key(self) -> Key:
        """What Triton compiles by: equal keys share the compiled form, and others do not."""
        kinds = [_kind(param, value) for param, value in zip(self.kernel.params, self.given, strict=True)]
        return self.name, *kinds, *sorted(self.options.items())


def _kind(param: Any, value: Any) -> object:
    if param.is_constexpr or value is None:
        return "constant", repr(value)
    if isinstance(value, torch.Tensor):
        exact = not param.do_not_specialize and not param.do_not_specialize_on_alignment
        return value.dtype, exact and value.data_ptr() % ALIGNED == 0
    if hasattr(value, "block_shape"):  # a descriptor
        return value.base.dtype, tuple(value.block_shape), repr(getattr(value, "layout", None))
    if isinstance(value, bool | float):
        return type(value)
    width = 32 if -(1 << 31) <= value < 1 << 31 else 64
    if param.do_not_specialize:
        return width
    is_aligned = not param.do_not_specialize_on_alignment and value % ALIGNED == 0
    return ("constant", "1") if value == 1 else (width, is_aligned)


class VariantList:
    """The variants that launches want, each once; a `launch.Listing`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.variants: dict[Key, Variant] = {}

    def add(self, kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        variant = Variant(kernel, given, options)
        self.variants.setdefault(variant.key, variant)


@contextmanager
def listing(machine: Machine) -> Iterator[VariantList]:
    """List what this thread launches from here on, as for a machine, and launch nothing."""
    found = VariantList(machine)
    token = LISTING.set(found)
    try:
        yield found
    finally:
        LISTING.reset(token)


def compile_variants(variants: Iterable[Variant], device: torch.device, progress: Progress | None = None) -> None:
    """Compile what Triton has not in its cache, side by side, and load everything onto the GPU.

    Threads are enough: all but the first tenth or so of a compilation lets other threads run.

    Raises:
        RuntimeError: a kernel does not compile, or wants more than the GPU has; says which.
    """
    wanted = list(variants)
    pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))))
    mode = AsyncCompileMode(pool, ignore_errors=True)
    try:
        with torch.cuda.device(device), _one_parser(), pool, mode, _cancelled_at_errors(pool, mode):
            begun = [variant.kernel.warmup(*variant.given, grid=(1,), **variant.options) for variant in wanted]
            for done, (variant, kernel) in enumerate(zip(wanted, begun, strict=True), start=1):
                _load(variant, kernel)
                if progress is not None:
                    progress(done, len(wanted), variant.name)
    except BaseException:
        _forget_unmade({variant.kernel for variant in wanted}, mode)
        raise


@contextmanager
def _cancelled_at_errors(pool: Executor, mode: AsyncCompileMode) -> Iterator[None]:
    """At an error, or Ctrl-C, what has not begun does not begin."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for future in filter(Future.cancelled, mode.raw_futures):  # else the mode waits for them forever
            future.set_running_or_notify_cancel()
        raise


def _forget_unmade(kernels: Iterable[Any], mode: AsyncCompileMode) -> None:
    """Take promises that are not kept from Triton's caches, where a later launch would find them and raise."""
    unmade = {id(promise) for promise in mode.future_kernels.values() if promise.kernel is None}
    for kernel in kernels:
        for made, *_ in kernel.device_caches.values():
            for key in [key for key, form in made.items() if id(form) in unmade]:
                del made[key]


@contextmanager
def _one_parser() -> Iterator[None]:
    """Only one thread parses Python at a time: CPython 3.11 counts the depth of all threads' trees as one, and raises a
    SystemError where two parse at once (python/cpython#106905)."""
    parse, lock = JITCallable.parse, RLock()

    def parse_alone(function: JITCallable) -> Any:
        with lock:
            return parse(function)

    JITCallable.parse = parse_alone
    try:
        yield
    finally:
        JITCallable.parse = parse


def _load(variant: Variant, kernel: Any) -> None:
    """Wait for a kernel, which may be a promise of one, and load it."""
    try:
        made = kernel.result() if isinstance(kernel, FutureKernel) else kernel
        made._init_handles()
    except Exception as error:  # whatever a compiler raises
        said = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"{variant.name} cannot be compiled for this GPU, and steps within the limits may want it: leave tiles out "
            f"of backend_options, lower the limits, or choose another backend ({type(error).__name__}: {said})"
        ) from error
