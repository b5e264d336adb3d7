"""Guard bands: tensors that lie inside larger ones, whose borders hold a pattern that is compared after every call.

A write beyond a tensor changes a border and is found. A read beyond a float tensor meets NaN; beyond an integer tensor
it meets a number that is wrong and harmless, such as a page of poison. Fresh memory starts with the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.testing.guards.band import EMPTY, Band, is_capturing, where_in_code

_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_FILLED = frozenset({"ones", "ones_like", "new_ones", "full", "full_like", "new_full", "clone"})
_MAKES = EMPTY | _ZEROS | _FILLED
_UNFILLED = {  # what makes the same tensor without its zeros, which the guarded one has in its place
    torch.ops.aten.zeros.default: torch.ops.aten.empty.memory_format,
    torch.ops.aten.zeros_like.default: torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default: torch.ops.aten.new_empty.default,
}
_DEVICE_TENSORS = ("query_start_loc", "seq_lens", "page_table", "slot_mapping")


class GuardError(AssertionError):
    """Something was written where it must not be; says to which tensor, and how far from it."""


class GuardBands:
    """All guarded tensors of one state and the calls over it.

    Args:
        beyond: what integers behind and in front of integer tensors are: a page that no request owns.
    """

    def __init__(self, beyond: int = 0) -> None:
        self.beyond = beyond
        self._bands: list[Band] = []
        self._watching = False
        self.is_making = False  # a guarded tensor: what is allocated for it is left alone
        self.from_python = False  # whether what is allocated was asked for in Python, by a function of torch's

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it every tensor that torch allocates is guarded, whoever asks: states, builders, impls, libraries."""
        if self._watching:
            yield
            return
        self._watching = True
        try:
            with _Factories(self) if torch.cuda.is_available() else nullcontext(), _Allocations(self):
                yield
        finally:
            self._watching = False

    def place(self, tensor: torch.Tensor, *, beyond: int | None = None, read_only: bool = False) -> torch.Tensor:
        """A guarded copy with the same strides.

        Args:
            beyond: for its own border in place of the common one.
            read_only: the copy itself must not change either.
        """
        where = f"an input {list(tensor.shape)} {tensor.dtype}"
        return self._guarded(tensor, where, self.beyond if beyond is None else beyond, True, read_only)

    def place_batch(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch with its page table, slots, lengths and starts guarded and read-only on the device."""
        beyond = {"slot_mapping": self.beyond * common.page_size, "query_start_loc": int(common.num_tokens)}
        placed: dict[str, Any] = {
            name: self.place(getattr(common, name), beyond=beyond.get(name), read_only=True) for name in _DEVICE_TENSORS
        }
        csr = common.csr
        if csr is not None:
            csr = type(csr)(*(self.place(tensor, read_only=True) for tensor in vars(csr).values()))
        return replace(common, csr=csr, **placed)

    def fresh(self, tensor: torch.Tensor, *, keep: bool, zero: bool = False, pinned: bool = False) -> torch.Tensor:
        """A guarded tensor in the place of one that was just allocated.

        Args:
            keep: its content counts, and is copied.
            zero: its content is zeros.
        """
        what = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        where = f"a tensor {what}, allocated in {where_in_code()}"
        slack = tensor.is_cuda and not self.from_python
        return self._guarded(tensor, where, self.beyond, keep, False, pinned, slack, zero)

    def check(self, what: str) -> None:
        """Compare all borders and read-only tensors with what they were, in one comparison a device.

        Raises:
            GuardError: some were written; says which, and in `what`.
        """
        alive = [band for band in self._bands if band.storage() is not None]
        for device in {band.device for band in alive}:
            here = [band for band in alive if band.device == device]
            if not _equal(here):
                raise GuardError(f"{what}: " + "; ".join(filter(None, (band.damage() for band in here))))
        for band in alive:
            band.release()
        self._bands = alive

    def _guarded(
        self, tensor: torch.Tensor, where: str, beyond: int, keep: bool, read_only: bool, pinned: bool = False,
        slack: bool = False, zero: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
            return tensor
        self.is_making = True
        try:
            band, inner = Band.around(tensor, where, beyond, pinned, slack, zero)
            if keep:
                inner.copy_(tensor)
            if read_only:
                band.freeze()
        finally:
            self.is_making = False
        self._bands.append(band)
        return inner


class _Factories(TorchFunctionMode):
    """Tells what Python code allocates from what a compiled library allocates for itself."""

    def __init__(self, guards: GuardBands) -> None:
        super().__init__()
        self._guards = guards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _MAKES:
            return func(*args, **(kwargs or {}))
        before, self._guards.from_python = self._guards.from_python, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._guards.from_python = before


class _Allocations(TorchDispatchMode):
    """Gives what was allocated a border; not while a CUDA graph is captured, as its replays write to what others have
    by then. A capture's warm-up makes the same launches, and there they have borders."""

    def __init__(self, guards: GuardBands) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guards = guards

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and a wrapper around every operator costs as much as the operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        is_guarded = name in _MAKES and not (self._guards.is_making or is_capturing())
        result = (_UNFILLED.get(func, func) if is_guarded else func)(*args, **kwargs)
        if isinstance(result, list):  # a library's operator may return tensors that are not defined: no mode takes them
            return [torch.empty(0, dtype=torch.uint8, device="cpu") if part is None else part for part in result]
        if is_guarded and "out" not in kwargs and isinstance(result, torch.Tensor):
            return self._guards.fresh(
                result, keep=name in _FILLED, zero=name in _ZEROS, pinned=bool(kwargs.get("pin_memory"))
            )
        return result


def _equal(bands: Sequence[Band]) -> bool:
    pairs = [pair for band in bands for pair in band.pairs()]
    if not pairs:
        return True
    got, expected = zip(*pairs, strict=True)
    return torch.equal(torch.cat(got), torch.cat(expected))
