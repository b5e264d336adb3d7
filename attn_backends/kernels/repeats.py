"""Launches of one layer, repeated for others: layers that are alike differ in a few addresses.

What decides a layer's launches (shapes, tiles, strides, numbers) takes the host several times as long as to start them.
So the first layer of a step goes all the way, and the launches of those that call with the same shapes are started at
once, with their own tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.kernels.driver import PreparedLaunch
from attn_backends.kernels.launch import (
    ALIGNED,
    INTERPRETED,
    LISTING,
    RECORDING,
    KernelForm,
    current_stream,
    describes_launches,
    forms_of_thread,
)

_aten = torch.ops.aten
_ALLOCATE = {  # and compute nothing
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_MOST_FORMS = 64  # of a step, of which graphs' stay


class _Launch(NamedTuple):
    prepared: PreparedLaunch
    grid: tuple[int, ...]
    addresses: list[int]  # those of the layer's own are overwritten
    own: list[tuple[int, int]]  # which of them is which of the layer's tensors
    varying: list[int]
    descriptors: tuple[Any, ...]
    described: list[int]  # which of the layer's tensors they are of
    kept: list[torch.Tensor]  # the others, so that their memory is


class LayerRecording(TorchDispatchMode):
    """A layer's launches, by its own tensors and by those of the step.

    They stand for other layers' unless torch computes something besides, one is not prepared, or one takes a tensor
    that is neither: a copy, say.

    Args:
        own: addresses of the layer's tensors; 0: none.
        storages: addresses of its tensors' memory, and of the step's.
    """

    def __init__(self, own: list[int], storages: set[int], of_step: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        given = [address for address in own if address]
        self._own = {address: i for i, address in enumerate(own) if address}
        self._of_step = of_step
        self._stands_for_others = len(self._own) == len(given) and not storages & of_step
        self._launches: list[_Launch] = []
        self.has_compiled = False  # something, on the way: another layer's launches will be prepared

    def refuse(self) -> None:
        self._stands_for_others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in _ALLOCATE:
            self.refuse()
        return func(*args, **(kwargs or {}))

    def add(
        self, found: KernelForm | None, grid: tuple[int, ...], tensors: Sequence[torch.Tensor], addresses: list[int],
        varying: tuple[float, ...], descriptors: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.has_compiled |= found is None
        own = [(i, self._own[address]) for i, address in enumerate(addresses) if address in self._own]
        kept = [tensor for tensor, address in zip(tensors, addresses, strict=True) if address not in self._own]
        bases = [0 if each is None else each.base.data_ptr() for each in descriptors]
        is_known = all(not base or base in self._own for base in bases) and {*map(_storage, kept)} <= self._of_step
        is_known = is_known and not any(map(_is_fake, kept))
        if found is None or found.prepared is None or not is_known:
            self.refuse()
            return
        without_base = tuple(None if each is None else _Descriptor(each.shape, each.strides) for each in descriptors)
        described = [self._own.get(base, -1) for base in bases]
        words = found.prepared.as_words(varying)
        self._launches.append(_Launch(found.prepared, grid, addresses, own, words, without_base, described, kept))

    def made(self) -> LayerLaunches | None:
        return LayerLaunches(self._launches) if self._stands_for_others and self._launches else None


class _Descriptor(NamedTuple):
    shape: Sequence[int]
    strides: Sequence[int]


class LayerLaunches:
    """Launches that a layer with other tensors, which lie alike, can start."""

    def __init__(self, launches: list[_Launch]) -> None:
        self._launches, self._forms = launches, forms_of_thread()

    @property
    def is_of_this_thread(self) -> bool:
        return self._forms is forms_of_thread()

    def start(self, addresses: list[int]) -> None:
        """Start all with the addresses of a layer's tensors, all of multiples of 16; 0: none."""
        stream = current_stream()
        for prepared, grid, given, own, varying, descriptors, described, _kept in self._launches:
            for i, which in own:
                given[i] = addresses[which]
            prepared.start(grid, stream, given, varying, descriptors, [addresses[which] for which in described])


class Repeats:
    """What the layers of one step have started, by how their tensors lie."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, LayerLaunches | None] = {}

    def __reduce__(self) -> tuple[type[Repeats], tuple[()]]:
        """A copy of a step has started nothing."""
        return Repeats, ()

    def run(
        self, layer: Hashable, tensors: Sequence[torch.Tensor | None], of_step: Callable[[], Iterable[torch.Tensor]],
        call: Callable[[], object],
    ) -> None:  # fmt: skip
        """Do what `call` does.

        Args:
            layer: equal for layers that differ in `tensors` alone.
            tensors: all that a call reads and writes that is not of the step.
            of_step: all that is.
            call: starts kernels. What else it does is done for layers that lie as no other does.
        """
        if (outer := RECORDING.get()) is not None:  # a call within a call
            outer.refuse()
            call()
            return
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        if INTERPRETED or LISTING.get() is not None or reduce(or_, addresses) % ALIGNED or describes_launches():
            call()
            return
        form = (layer, *(None if each is None else (each.shape, each.stride(), each.dtype, each.device, not address)
                         for each, address in zip(tensors, addresses, strict=True)))  # fmt: skip
        kept = self._kept.get(form)
        if kept is not None and kept.is_of_this_thread:
            kept.start(addresses)
        elif kept is None and form in self._kept:
            call()
        else:
            self._record(form, addresses, tensors, of_step, call)

    def _record(
        self, form: Hashable, addresses: list[int], tensors: Sequence[torch.Tensor | None],
        of_step: Callable[[], Iterable[torch.Tensor]], call: Callable[[], object],
    ) -> None:  # fmt: skip
        storages = {_storage(each) for each in tensors if each is not None and each.data_ptr()}
        recording = LayerRecording(addresses, storages, {*map(_storage, of_step())})
        token = RECORDING.set(recording)
        try:
            with recording:
                call()
        finally:
            RECORDING.reset(token)
        if recording.has_compiled:
            return
        if len(self._kept) == _MOST_FORMS:
            self._kept.clear()
        self._kept[form] = recording.made()


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has elements, and no memory on its device."""
    return tensor.numel() > 0 and not tensor.data_ptr() and tensor.device.type != "meta"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
