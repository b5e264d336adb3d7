"""Kernels in Gluon on a CPU: their Python source as it is, over torch tensors. Triton's interpreter has no Gluon.

The programs of a launch run one after the other; the partitions of a program are threads of which one runs at a time,
until it has to wait. What is asynchronous happens as late as it may: a copy leaves NaN in its place until all others
wait, and a product is worked out when it is waited for, with what its operands hold then. So a wait that is missing, or
a place that is free too early, gives NaN or an error; so do loads and stores outside of a tensor, and partitions that
wait for each other.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import KernelInterface

from attn_backends.kernels import hopper as triton_hopper

Dtype = torch.dtype


class Layout:
    """Any of registers: where a tensor lies does not matter here."""

    def __init__(self, *given: Any, **more: Any) -> None:
        pass

    @property
    def parent(self) -> Layout:
        return self


# Tensors in registers.


def _data(value: Any) -> Any:
    return value.data if isinstance(value, Tensor) else value


def _divide(a: Any, b: Any) -> torch.Tensor:
    return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc")  # as the GPU does


def _remainder(a: Any, b: Any) -> torch.Tensor:
    return torch.fmod(torch.as_tensor(a), torch.as_tensor(b))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
    "floordiv": _divide, "mod": _remainder, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip


class Tensor:
    """A tensor or, of no dimension, a scalar."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=Layout())

    def to(self, dtype: Dtype) -> Tensor:
        return Tensor(self.data.to(dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def _operator(apply: Callable[[Any, Any], Any], is_swapped: bool) -> Callable[[Tensor, Any], Any]:
    def operate(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        pair = (_data(other), self.data) if is_swapped else (self.data, _data(other))
        return Tensor(apply(*pair))

    return operate


for _name, _apply in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _operator(_apply, False))
    setattr(Tensor, f"__r{_name}__", _operator(_apply, True))


class Pointer:
    """Elements of a tensor's storage, counted from the tensor's first."""

    def __init__(self, storage: torch.Tensor, at: torch.Tensor) -> None:
        self.storage, self.at = storage, at

    @staticmethod
    def to_first(tensor: torch.Tensor) -> Pointer:
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        return Pointer(tensor.as_strided((numel,), (1,)), torch.tensor(0))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.storage.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.at.shape)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.at + _data(other))

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.storage, self.at[index])

    def chosen(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where, and which of these.

        Raises:
            IndexError: one of them is outside of the storage.
        """
        mask = torch.as_tensor(True if mask is None else _data(mask))
        at, mask = torch.broadcast_tensors(self.at, mask)
        outside = mask & ((at < 0) | (at >= len(self.storage)))
        if bool(outside.any()):
            raise IndexError(f"elements {at[outside].tolist()[:4]} of {len(self.storage)}")
        return at, mask


# Shared memory.


class Shared:
    """A matrix [rows, columns] of which `tiles` [tiles, rows, width] are the columns, one tile after the other."""

    def __init__(self, tiles: torch.Tensor, is_transposed: bool = False) -> None:
        self.tiles, self.is_transposed = tiles, is_transposed

    @property
    def dtype(self) -> Dtype:
        return self.tiles.dtype

    @property
    def shape(self) -> list[int]:
        tiles, rows, width = self.tiles.shape
        return [rows, tiles * width]

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.tiles.transpose(0, 1).reshape(self.shape).clone())

    def store(self, value: Tensor) -> None:
        tiles, rows, width = self.tiles.shape
        self.tiles.copy_(value.data.expand(self.shape).reshape(rows, tiles, width).transpose(0, 1))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Some rows, or some columns of one tile."""
        if dim == 0:
            return Shared(self.tiles[:, start : start + length])
        assert len(self.tiles) == 1
        assert start + length <= self.shape[1]
        return Shared(self.tiles[:, :, start : start + length])

    def permute(self, order: tuple[int, int]) -> Shared:
        assert order == (1, 0)
        return Shared(self.tiles, not self.is_transposed)

    def index(self, i: Any) -> Line:
        (matrix,) = self.tiles
        return Line(matrix[int(i)])


class Line:
    """A row of a matrix in shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.clone())

    def store(self, value: Tensor) -> None:
        self.data.copy_(value.data)


class SharedArray:
    """Matrices, each of `together` of `data` [any, rows, width] side by side."""

    def __init__(self, data: torch.Tensor, together: int = 1) -> None:
        self.data, self.together = data, together

    @property
    def dtype(self) -> Dtype:
        return self.data.dtype

    def index(self, i: Any) -> Shared:
        start = int(i) * self.together
        assert 0 <= start < len(self.data)
        return Shared(self.data[start : start + self.together])

    def _reinterpret(self, dtype: Dtype, shape: Sequence[int], layout: Any) -> SharedArray:
        """Matrices beside one another as one, or one as several below one another; or the first of them alone."""
        data = self.data.view(dtype)
        count, matrix_rows, *_one_head, columns = shape
        _count, rows, width = data.shape
        if columns == width and rows % matrix_rows == 0:
            data = data.view(-1, matrix_rows, width)
        together = columns // width
        assert columns % width == 0, shape
        assert data.shape[1] == matrix_rows, shape
        assert count * together <= len(data), shape
        return SharedArray(data[: count * together], together)


class Barrier:
    """An mbarrier: its phase ends when all have arrived, and the bytes that they expect."""

    def __init__(self) -> None:
        self.count = self.waiting_for = self.num_bytes = self.phase = 0

    def arrive(self, num_bytes: int = 0) -> None:
        assert self.waiting_for > 0, "more arrive than the barrier counts"
        self.waiting_for -= 1
        self.num_bytes += num_bytes
        self._end_phase()

    def land(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._end_phase()

    def _end_phase(self) -> None:
        if self.waiting_for == 0 and self.num_bytes == 0:
            self.waiting_for, self.phase = self.count, self.phase + 1


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class BarrierLayout:
    pass


# Products.


class Product:
    """What a product will be, once it is waited for."""

    type: Any = SimpleNamespace(layout=Layout())
    data: torch.Tensor | None = None

    def __init__(self, work_out: Callable[[], torch.Tensor]) -> None:
        self.work_out = work_out


def _operand(of: Any) -> torch.Tensor:
    if isinstance(of, Tensor):
        return of.data
    matrix: torch.Tensor = of.load(None).data
    return matrix.T if of.is_transposed else matrix


def _multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    kept = a if isinstance(a, Shared) else Tensor(a.data.clone())

    def work_out() -> torch.Tensor:
        product = _operand(kept).float() @ _operand(b).float()
        return product if not use_acc else product + acc.data

    made = Product(work_out)
    _program().partition.products.append(made)
    return made


def _wait_for_products(pending: int, deps: tuple[Any, ...]) -> Any:
    products = _program().partition.products
    while len(products) > pending:
        first = products.pop(0)
        first.data = first.work_out()
    found = tuple(Tensor(dep.data) for dep in deps)
    return found if len(found) > 1 else found[0]


# Programs and their partitions.


class _Ended(BaseException):
    """Another partition has failed."""


class Partition:
    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.products: list[Product] = []
        self.copies: list[Callable[[], None]] = []  # asked for by its threads
        self.is_ready: Callable[[], bool] | None = lambda: True  # None: it has ended
        self.may_run = threading.Event()
        self.run = functools.partial(function, *arguments)


class Program:
    """One program of a launch."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.copies: list[Callable[[], None]] = []  # by the tensor memory accelerator, not landed
        self.partitions: list[Partition] = []
        self.current = -1  # which of them runs
        self.error: BaseException | None = None
        self.order = random.Random(number)  # in which copies land
        self.is_inference = torch.is_inference_mode_enabled()  # which is a thread's own

    @property
    def partition(self) -> Partition:
        """That runs."""
        return self.partitions[self.current]

    def specialize(self, functions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        self.partitions = [Partition(*given) for given in functions]
        threads = [threading.Thread(target=self._run, args=(part,), daemon=True) for part in self.partitions]
        for thread in threads:
            thread.start()
        self._go_on()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Others run until it is ready, or want to wait themselves."""
        mine = self.partition
        mine.is_ready = is_ready
        mine.may_run.clear()
        self._go_on()
        mine.may_run.wait()
        if self.error is not None:
            raise _Ended

    def _run(self, part: Partition) -> None:
        part.may_run.wait()
        try:
            if self.error is None:
                with torch.inference_mode(self.is_inference):
                    part.run()
        except _Ended:
            pass
        except BaseException as error:
            self.error = self.error or error
        part.is_ready = None
        self._go_on()

    def _go_on(self) -> None:
        """Choose who runs, of those that can. In every third program whoever comes after the one that ran; in others
        the last, which loads or takes tiles, as far ahead as it may, then the others, from behind or from the front."""
        if self.error is not None:
            for part in self.partitions:
                part.may_run.set()
            return
        count = len(self.partitions)
        first, *others = reversed(range(count))
        order = [
            [(self.current + i) % count for i in range(1, count + 1)],
            [first, *others],
            [first, *reversed(others)],
        ][self.number % 3]
        while any(part.is_ready is not None for part in self.partitions):
            for number in order:
                part = self.partitions[number]
                if part.is_ready is not None and part.is_ready():
                    self.current = number
                    part.may_run.set()
                    return
            if not self.copies:
                self.error = RuntimeError(f"program {self.number}: all partitions wait, and nothing is under way")
                self._go_on()
                return
            self.copies.pop(self.order.randrange(len(self.copies)))()


_running: list[Program] = []


def _program() -> Program:
    return _running[-1]


# The language.


def _apply(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    def call(*given: Any) -> Tensor:
        return Tensor(function(*(torch.as_tensor(_data(value)) for value in given)))

    return call


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **how: Any) -> Tensor:
    at, mask = pointer.chosen(mask)
    loaded = pointer.storage[torch.where(mask, at, 0)]
    worst = math.nan if loaded.dtype.is_floating_point else -(1 << 20)
    return Tensor(torch.where(mask, loaded, torch.tensor(worst if other is None else other).to(loaded.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, mask = pointer.chosen(mask)
    values = torch.as_tensor(_data(value)).to(pointer.storage.dtype).expand(at.shape)
    pointer.storage[at[mask]] = values[mask]


def _to_fp16_pairs(words: Tensor, e5m2: bool) -> Tensor:
    narrow = words.data.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
    return Tensor(narrow.to(torch.float16).view(torch.int32))


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    was = _load(pointer)
    _store(pointer, was + value)
    return was


def _allocate(dtype: Dtype, shape: Sequence[int], layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        return Barriers(shape[0])
    worst = math.nan if dtype.is_floating_point else -(1 << 20)
    data = torch.full(tuple(shape), worst, dtype=dtype)
    return Shared(data[None]) if len(shape) == 2 else SharedArray(data)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.waiting_for = count


def _arrive(barrier: Barrier) -> None:
    barrier.arrive()
    _program().wait(lambda: True)  # whoever waits for it can be first


def _wait(barrier: Barrier, parity: Any) -> None:
    parity = int(parity)
    if barrier.phase % 2 == parity:
        _program().wait(lambda: barrier.phase % 2 != parity)


class Descriptor:
    """A `TensorDescriptor` on the device."""

    def __init__(self, given: TensorDescriptor) -> None:
        self.tensor = given.base.as_strided(given.shape, given.strides)
        self.rows, *_one_head, self.width = given.block_shape
        self.block_type = SimpleNamespace(nbytes=self.rows * self.width * given.base.itemsize)

    def copy(self, coordinates: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        """Of a matrix, all columns of a block are there; of one head of several, what is not is zero."""
        row, *head, column = map(int, coordinates)
        matrix = self.tensor[:, head[0]] if head else self.tensor
        assert to.shape == [self.rows, self.width]
        last = matrix.shape[1] - (1 if head else self.width)
        if not 0 <= row < len(matrix) or not 0 <= column <= last:
            raise IndexError(f"a block at {row}, {column} of {list(matrix.shape)}")
        to.store(Tensor(torch.tensor(math.nan, dtype=to.dtype)))

        def land() -> None:
            block = matrix[row : row + self.rows, column : column + self.width]
            lacking = (0, self.width - block.shape[1], 0, self.rows - len(block))
            to.store(Tensor(torch.nn.functional.pad(block, lacking)))
            barrier.land(self.block_type.nbytes)

        _program().copies.append(land)


def _copy_by_threads(to: Shared, pointer: Pointer, mask: Any = None) -> None:
    """What is not copied is zero afterwards."""
    at, mask = pointer.chosen(mask)
    to.store(Tensor(torch.tensor(math.nan, dtype=to.dtype)))

    def land() -> None:
        to.store(Tensor(torch.where(mask, pointer.storage[torch.where(mask, at, 0)], 0)))

    _program().partition.copies.append(land)


def _wait_for_copies(pending: int) -> None:
    assert pending == 0
    for land in _program().partition.copies:
        land()
    _program().partition.copies.clear()


LANGUAGE = SimpleNamespace(
    int32=torch.int32, int64=torch.int64, float16=torch.float16, float32=torch.float32,
    NVMMADistributedLayout=Layout, SliceLayout=Layout, BlockedLayout=Layout, DotOperandLayout=Layout,
    SwizzledSharedLayout=Layout,
    program_id=lambda axis: Tensor(torch.tensor(_program().number, dtype=torch.int32)),
    num_programs=lambda axis: _program().count,
    num_warps=lambda: 4,
    static_range=range,
    arange=lambda start, stop, layout=None: Tensor(torch.arange(start, stop, dtype=torch.int32)),
    full=lambda shape, value, dtype, layout=None: Tensor(torch.full(tuple(shape), value, dtype=dtype)),
    zeros=lambda shape, dtype, layout=None: Tensor(torch.zeros(tuple(shape), dtype=dtype)),
    full_like=lambda like, value: Tensor(torch.full_like(like.data, value)),
    zeros_like=lambda like: Tensor(torch.zeros_like(like.data)),
    convert_layout=lambda value, layout, assert_trivial=False: value,
    where=_apply(torch.where), maximum=_apply(torch.maximum), minimum=_apply(torch.minimum),
    exp2=_apply(torch.exp2), log2=_apply(torch.log2), abs=_apply(torch.abs),
    max=lambda value, axis: Tensor(value.data.amax(axis)),
    sum=lambda value, axis: Tensor(value.data.sum(axis, dtype=value.dtype)),
    associative_scan=lambda value, axis, add: Tensor(value.data.cumsum(axis, dtype=value.dtype)),
    load=_load, store=_store, atomic_add=_atomic_add,
    allocate_shared_memory=_allocate,
    warp_specialize=lambda *given: _program().specialize(*given),
)  # fmt: skip

_STAND_INS: dict[int, Any] = {
    id(gl): LANGUAGE,
    id(tl): LANGUAGE,
    id(hopper.mbarrier): SimpleNamespace(
        MBarrierLayout=BarrierLayout, init=_init, arrive=_arrive, wait=_wait, expect=Barrier.arrive
    ),
    id(hopper.tma): SimpleNamespace(
        async_copy_global_to_shared=lambda desc, at, barrier, to: desc.copy(at, barrier, to)
    ),
    id(async_copy): SimpleNamespace(
        async_copy_global_to_shared=_copy_by_threads, commit_group=lambda: None, wait_group=_wait_for_copies
    ),
    id(hopper.warpgroup_mma): _multiply,
    id(hopper.warpgroup_mma_wait): _wait_for_products,
    id(hopper.fence_async_shared): lambda: None,
    id(triton_hopper.to_fp16_pairs): _to_fp16_pairs,
    id(getattr(gl, "barrier", None) or gl.thread_barrier): lambda: None,
}


def _stand_in(value: Any) -> Any:
    """What a global of a kernel's module is here."""
    if id(value) in _STAND_INS:
        return _STAND_INS[id(value)]
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, KernelInterface):
        return _function(value.fn)
    return value


_globals: dict[int, dict[str, Any]] = {}  # of modules, by where their own are: what stands in keeps those alive


def _function(function: FunctionType) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        of_module = function.__globals__
        if id(of_module) not in _globals:
            _globals[id(of_module)] = {name: _stand_in(value) for name, value in of_module.items()}
        return FunctionType(function.__code__, _globals[id(of_module)], function.__name__)(*given)

    return call


class Emulated:
    """Stands for a kernel: `kernel[grid](…)` runs all of its programs, and tells how many there are."""

    def __init__(self, kernel: Any, tell: Callable[[int], None]) -> None:
        self.function, self.tell = _function(kernel.fn), tell
        types = kernel.fn.__annotations__
        self.is_constant = ["constexpr" in types.get(name, "") for name in kernel.arg_names]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (count,) = grid

        def launch(*given: Any, num_warps: int) -> None:
            self.tell(count)
            arguments = [*map(_argument, given, self.is_constant)]
            for number in range(count):
                _running.append(Program(number, count))
                try:
                    self.function(*arguments)
                finally:
                    _running.pop()

        return launch


def _argument(value: Any, is_constant: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer.to_first(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    return value if is_constant else Tensor(torch.tensor(value, dtype=torch.float32 if type(value) is float else None))
