"""Kernels in Gluon on a CPU: their Python source as it is, over torch tensors. Triton's interpreter has no Gluon.

The programs of a launch run one after the other; the partitions of a program are threads of which one runs at a time,
until it has to wait. What is asynchronous happens as late as it may: a copy leaves NaN in its place until all others
wait, and a product is worked out when it is waited for, with what its operands hold then. So a wait that is missing, or
a place that is free too early, gives NaN or an error; so do loads and stores outside of a tensor, and partitions that
wait for each other. In a kernel's further launches copies land at any time, and partitions run in any order: so is
found what may be overtaken.
"""

from __future__ import annotations

import functools
import math
import operator
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
from triton.runtime.jit import ConstexprFunction, KernelInterface

from attn_backends.kernels import hopper as triton_hopper, hopper_writes

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
    """What an operator of torch takes for it: a tensor, or a number."""
    return value.number if type(value) is Scalar else value.data if isinstance(value, Tensor) else value


def _tensor(value: Any) -> torch.Tensor:
    return value.data if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def _on_host(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, device="cpu")


def _divide(a: Any, b: Any) -> torch.Tensor:
    return torch.div(_on_host(a), _on_host(b), rounding_mode="trunc")  # as the GPU does


def _remainder(a: Any, b: Any) -> torch.Tensor:
    return torch.fmod(_on_host(a), _on_host(b))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "floordiv": _divide,
    "mod": _remainder, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
_OF_NUMBERS: dict[str, Callable[[int, int], int]] = {
    **{name: _OPERATORS[name] for name in ("add", "sub", "mul", *_COMPARISONS)},
    "floordiv": lambda a, b: a // b if (a < 0) == (b < 0) else -(-a // b),
    "mod": lambda a, b: int(math.fmod(a, b)),
}


class Tensor:
    """A tensor or, of no dimension, a scalar."""

    __slots__ = ("data",)
    __hash__ = None  # type: ignore[assignment]

    data: torch.Tensor

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
        return _ANY_LAYOUT

    def to(self, dtype: Dtype) -> Tensor:
        return _scalar(self.data.to(dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.data[index])

    def reshape(self, shape: Sequence[int]) -> Tensor:
        return Tensor(self.data.reshape(tuple(shape)))

    def expand_dims(self, axis: int) -> Tensor:
        return Tensor(self.data.unsqueeze(axis))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


_ANY_LAYOUT = SimpleNamespace(layout=Layout())


class Scalar(Tensor):
    """An integer of 32 bits, as a number: most of what a kernel works out are such, and torch takes long for them."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor(self.number, dtype=torch.int32, device="cpu")

    @property
    def dtype(self) -> Dtype:
        return torch.int32

    @property
    def shape(self) -> list[int]:
        return []

    def __bool__(self) -> bool:
        return self.number != 0

    def __index__(self) -> int:
        return self.number


def _scalar(data: torch.Tensor) -> Tensor:
    return Scalar(int(data)) if data.dtype is torch.int32 and data.ndim == 0 else Tensor(data)


def _operator(apply: Callable[[Any, Any], Any], is_swapped: bool) -> Callable[[Tensor, Any], Any]:
    def operate(self: Tensor, other: Any) -> Any:
        kind = type(other)
        if kind is Pointer:
            return NotImplemented
        mine = self.data
        if kind is Tensor:
            other = other.data
        elif kind is Scalar:  # among others of one kind a number counts as a scalar of torch does
            other = other.number if mine.ndim and mine.dtype is not torch.bool else other.data
        return Tensor(apply(other, mine) if is_swapped else apply(mine, other))

    return operate


def _operator_of_numbers(
    name: str, of_tensors: Callable[[Tensor, Any], Any], is_swapped: bool
) -> Callable[[Scalar, Any], Any]:
    """The same of two integers of 32 bits; anything else is torch's."""
    apply, is_comparison, divides = _OF_NUMBERS[name], name in _COMPARISONS, name in ("floordiv", "mod")

    def operate(self: Scalar, other: Any) -> Any:
        kind = type(other)
        if kind is Scalar:
            number = other.number
        elif kind is int and -_TOO_LARGE <= other < _TOO_LARGE:
            number = other
        else:
            return of_tensors(self, other)
        a, b = (number, self.number) if is_swapped else (self.number, number)
        if divides and b == 0:
            return of_tensors(self, other)
        made = apply(a, b)
        if is_comparison:
            return _BOOLS[made]
        return Scalar(made) if -_TOO_LARGE <= made < _TOO_LARGE else of_tensors(self, other)

    return operate


_TOO_LARGE = 1 << 31
_BOOLS = Tensor(torch.tensor(False)), Tensor(torch.tensor(True))

for _name, _apply in _OPERATORS.items():
    for _prefix, _is_swapped in (("", False), ("r", True)):
        _of_tensors = _operator(_apply, _is_swapped)
        setattr(Tensor, f"__{_prefix}{_name}__", _of_tensors)
        if _name in _OF_NUMBERS:
            setattr(Scalar, f"__{_prefix}{_name}__", _operator_of_numbers(_name, _of_tensors, _is_swapped))


class Pointer:
    """Elements of a tensor's storage, counted from the tensor's first."""

    def __init__(self, storage: torch.Tensor, at: torch.Tensor) -> None:
        self.storage, self.at = storage, at

    @staticmethod
    def to_first(tensor: torch.Tensor) -> Pointer:
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        return Pointer(tensor.as_strided((numel,), (1,)), torch.tensor(0, device="cpu"))

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

    def chosen(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where, 0 for those that are not, and which are; None: all.

        Raises:
            IndexError: one of them is outside of the storage.
        """
        at = self.at
        if mask is not None:
            mask = _tensor(mask)
            at = torch.where(mask, at, 0)
        first, last = at.aminmax()
        if not 0 <= int(first) <= int(last) < len(self.storage):
            outside = (at < 0) | (at >= len(self.storage))
            raise IndexError(f"elements {at[outside].tolist()[:4]} of {len(self.storage)}")
        return at, None if mask is None else mask.expand(at.shape)

    def loaded(self, mask: Any, other: Any) -> torch.Tensor:
        """What is there, and `other` where the mask says so: of all, whatever the pointer is."""
        if mask is not None and not _tensor(mask).any():
            shape = torch.broadcast_shapes(self.at.shape, _tensor(mask).shape)
            return torch.full(shape, _data(other), device="cpu").to(self.storage.dtype)
        at, mask = self.chosen(mask)
        there = self.storage[at]
        return there if mask is None else torch.where(mask, there, _on_host(other).to(there.dtype))


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

    @property
    def shape(self) -> list[int]:
        count, rows, width = self.data.shape
        return [count // self.together, rows, width * self.together]

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


class NamedBarrier(Barrier):
    """Where two groups of warps meet: one that syncs waits for the other's arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waiting_for = 2

    def sync(self) -> None:
        before = self.phase
        self.arrive()
        if self.phase == before:
            _program().wait(lambda: self.phase > before)


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    @property
    def shape(self) -> list[int]:
        return [len(self.barriers), 1]

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

    def __init__(self, number: int, count: int, launch: int) -> None:
        self.number, self.count, self.launch = number, count, launch
        self.copies: list[Callable[[], None]] = []  # by the tensor memory accelerator, not landed
        self.partitions: list[Partition] = []
        self.current = -1  # which of them runs
        self.error: BaseException | None = None
        self.order = random.Random(f"{launch}/{number}")  # in which copies land, and who comes first
        self.ranks: list[int] = []
        self.turns = [NamedBarrier(), NamedBarrier()]

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
        assert all(turn.waiting_for == turn.count for turn in self.turns), "turns are left over"

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Others run until it is ready, or want to wait themselves."""
        mine = self.partition
        mine.is_ready = is_ready
        mine.may_run.clear()
        self._go_on()
        mine.may_run.wait()
        if self.error is not None:
            raise _Ended

    @torch.inference_mode()  # which is a thread's own
    def _run(self, part: Partition) -> None:
        part.may_run.wait()
        try:
            if self.error is None:
                part.run()
        except _Ended:
            pass
        except BaseException as error:
            self.error = self.error or error
        part.is_ready = None
        self._go_on()

    def _go_on(self) -> None:
        """Choose who runs, of those that can, or let a copy land."""
        if self.error is not None:
            for part in self.partitions:
                part.may_run.set()
            return
        while any(part.is_ready is not None for part in self.partitions):
            for number in self._ranked():
                if number == len(self.partitions):
                    if self.copies:
                        self.copies.pop(self.order.randrange(len(self.copies)))()
                        break
                    continue
                part = self.partitions[number]
                if part.is_ready is not None and part.is_ready():
                    self.current = number
                    part.may_run.set()
                    return
            else:
                self.error = RuntimeError(f"program {self.number}: all partitions wait, and nothing is under way")
                self._go_on()
                return

    def _ranked(self) -> list[int]:
        """Partitions, and copies by the number behind theirs, in the order in which they are asked.

        In a kernel's first launch copies come last: in every third program behind whoever comes after the one that ran;
        in others behind the last, which loads or takes tiles, as far ahead as it may, then the others, from behind or
        from the front. In further launches all come in any order, another one now and then, or always.
        """
        count = len(self.partitions)
        if self.launch > 0:
            if not self.ranks or self.order.random() < (0.0, 0.05, 1.0)[(self.launch + self.number) % 3]:
                self.ranks = self.order.sample(range(count + 1), count + 1)
            return self.ranks
        first, *others = reversed(range(count))
        ways = [
            [(self.current + i) % count for i in range(1, count + 1)],
            [first, *others],
            [first, *reversed(others)],
        ]
        return [*ways[self.number % 3], count]


_running: list[Program] = []


def _program() -> Program:
    return _running[-1]


# The language.


def _apply(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    def call(*given: Any) -> Tensor:
        return _scalar(function(*map(_tensor, given)))

    return call


def _choose(
    of_numbers: Callable[[int, int], int], function: Callable[..., torch.Tensor]
) -> Callable[[Any, Any], Tensor]:
    of_tensors = _apply(function)

    def call(a: Any, b: Any) -> Tensor:
        if {type(a), type(b)} <= {Scalar, int}:
            return Scalar(of_numbers(int(a), int(b)))
        return of_tensors(a, b)

    return call


def _require(holds: bool) -> None:
    assert holds


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **how: Any) -> Tensor:
    worst = math.nan if pointer.storage.is_floating_point() else -(1 << 20)
    return _scalar(pointer.loaded(mask, worst if other is None else other))


_written: dict[int, torch.Tensor] = {}  # by address: which results of a launch there are


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, mask = pointer.chosen(mask)
    values = _tensor(value).to(pointer.storage.dtype).expand(at.shape)
    if mask is not None:
        at, values = at[mask], values[mask]
    if pointer.storage.is_floating_point():  # others are counters
        written = _written.setdefault(
            pointer.storage.data_ptr(), pointer.storage.new_zeros(len(pointer.storage), dtype=torch.bool)
        )
        assert not written[at].any(), "a result is written twice"
        written[at] = True
    pointer.storage[at] = values


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
    data = torch.full(tuple(shape), worst, dtype=dtype, device="cpu")
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
        """Of a matrix, all columns of a block are there, and zeros where its rows are nowhere; of one head of several,
        what is not there is zero."""
        row, *head, column = map(int, coordinates)
        matrix = self.tensor[:, head[0]] if head else self.tensor
        assert to.shape == [self.rows, self.width]
        last = matrix.shape[1] - (1 if head else self.width)
        is_nowhere = row == triton_hopper.NOWHERE.value
        if not (is_nowhere or 0 <= row < len(matrix)) or not 0 <= column <= last:
            raise IndexError(f"a block at {row}, {column} of {list(matrix.shape)}")
        to.tiles.fill_(math.nan)

        def land() -> None:
            block = matrix[row : row + self.rows, column : column + self.width]
            lacking = (0, self.width - block.shape[1], 0, self.rows - len(block))
            to.store(Tensor(torch.nn.functional.pad(block, lacking) if any(lacking) else block))
            barrier.land(self.block_type.nbytes)

        _program().copies.append(land)


def _copy_by_threads(to: Shared, pointer: Pointer, mask: Any = None) -> None:
    """What is not copied is zero afterwards. One copy of two lands at once, the other where it is waited for."""
    pointer.chosen(mask)
    to.tiles.fill_(math.nan if to.dtype.is_floating_point else -(1 << 20))

    def land() -> None:
        to.store(Tensor(pointer.loaded(mask, 0)))

    if _program().order.random() < 0.5:
        land()
    else:
        _program().partition.copies.append(land)


def _wait_for_copies(pending: int) -> None:
    assert pending == 0
    for land in _program().partition.copies:
        land()
    _program().partition.copies.clear()


LANGUAGE = SimpleNamespace(
    int32=torch.int32, int64=torch.int64, float16=torch.float16, float32=torch.float32,
    float8e4nv=torch.float8_e4m3fn, float8e5=torch.float8_e5m2,
    NVMMADistributedLayout=Layout, SliceLayout=Layout, BlockedLayout=Layout, DotOperandLayout=Layout,
    SwizzledSharedLayout=Layout,
    program_id=lambda axis: Scalar(_program().number),
    num_programs=lambda axis: _program().count,
    num_warps=lambda: 4,
    static_range=range,
    static_assert=_require,
    arange=lambda start, stop, layout=None: Tensor(torch.arange(start, stop, dtype=torch.int32, device="cpu")),
    full=lambda shape, value, dtype, layout=None: Tensor(torch.full(tuple(shape), value, dtype=dtype, device="cpu")),
    zeros=lambda shape, dtype, layout=None: Tensor(torch.zeros(tuple(shape), dtype=dtype, device="cpu")),
    full_like=lambda like, value: Tensor(torch.full_like(like.data, value)),
    zeros_like=lambda like: Tensor(torch.zeros_like(like.data)),
    convert_layout=lambda value, layout, assert_trivial=False: value,
    where=_apply(torch.where), maximum=_choose(max, torch.maximum), minimum=_choose(min, torch.minimum),
    exp2=_apply(torch.exp2), log2=_apply(torch.log2), abs=_apply(torch.abs),
    max=lambda value, axis: _scalar(value.data.amax(axis)),
    sum=lambda value, axis: _scalar(value.data.sum(axis, dtype=value.dtype)),
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
    id(triton_hopper.anew): lambda number: number if isinstance(number, Scalar) else Scalar(number),
    id(triton_hopper.take_turn): lambda turn: turn < 0 or _program().turns[turn].sync(),
    id(triton_hopper.pass_turn): lambda turn: turn < 0 or _program().turns[1 - turn].arrive(),
    id(triton_hopper.to_fp16_pairs): _to_fp16_pairs,
    id(triton_hopper.as_words): lambda p, of_dtype: Tensor(p.data.to(of_dtype).view(torch.int32)),
    id(triton_hopper.of_words): lambda words, of_dtype: Tensor(words.data.view(of_dtype)),
    id(hopper_writes.words_together): lambda words: words,
    id(hopper_writes.floats_together): lambda acc: acc,
    id(hopper_writes._as_written): lambda num_columns, itemsize: Layout(),
    id(getattr(gl, "barrier", None) or gl.thread_barrier): lambda: None,
}


def _stand_in(value: Any) -> Any:
    """What a global of a kernel's module is here."""
    if id(value) in _STAND_INS:
        return _STAND_INS[id(value)]
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, ConstexprFunction):
        return functools.cache(value.fn)  # of numbers
    if isinstance(value, KernelInterface):
        return _function(value.fn)
    return value


_modules: dict[
    int, tuple[dict[str, Any], dict[str, Any]]
] = {}  # globals and what stands in for them, by where they are


def _function(function: FunctionType) -> Callable[..., Any]:
    of_module = function.__globals__
    if id(of_module) not in _modules:
        stand_ins: dict[str, Any] = {}
        _modules[id(of_module)] = of_module, stand_ins
        stand_ins.update((name, _stand_in(value)) for name, value in of_module.items())
    return FunctionType(function.__code__, _modules[id(of_module)][1], function.__name__)


class Emulated:
    """Stands for a kernel: `kernel[grid](…)` runs all of its programs, and tells how many there are."""

    def __init__(self, kernel: Any, tell: Callable[[int], None]) -> None:
        self.function, self.tell, self.launches = _function(kernel.fn), tell, 0
        types = kernel.fn.__annotations__
        self.is_constant = ["constexpr" in types.get(name, "") for name in kernel.arg_names]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (count,) = grid

        @torch.inference_mode()
        def launch(*given: Any, num_warps: int, maxnreg: int | None = None) -> None:
            self.tell(count)
            _written.clear()
            arguments = [*map(_argument, given, self.is_constant)]
            for number in range(count):
                _running.append(Program(number, count, self.launches))
                try:
                    self.function(*arguments)
                finally:
                    _running.pop()
            self.launches += 1

        return launch


def _argument(value: Any, is_constant: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer.to_first(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if is_constant or value is None:
        return value
    if type(value) is int and -_TOO_LARGE <= value < _TOO_LARGE:
        return Scalar(value)
    return Tensor(torch.tensor(value, dtype=torch.float32 if type(value) is float else None, device="cpu"))
