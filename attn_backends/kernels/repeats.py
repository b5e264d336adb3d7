"""Launches of one layer, repeated for others: layers that are alike differ in a few addresses.

What decides a layer's launches (shapes, tiles, strides, numbers) takes the host several times as long as to start them.
So the first layer of a step goes all the way, and the launches of those that call with the same shapes are started at
once, with their own tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from operator import or_
from threading import get_ident
from typing import Any, NamedTuple

import torch

from attn_backends.kernels.driver import PreparedLaunch
from attn_backends.kernels.launch import (
    ALIGNED,
    INTERPRETED,
    LISTING,
    RECORDING,
    KernelForm,
    current_stream,
    describes_launches,
)


class _Launch(NamedTuple):
    prepared: PreparedLaunch
    grid: tuple[int, ...]
    addresses: list[int]  # those of the layer's own are overwritten
    own: list[tuple[int, int]]  # which of them is which of the layer's tensors
    varying: list[int]
    descriptors: tuple[Any, ...]
    described: list[int]  # which of the layer's tensors they are of
    kept: list[torch.Tensor]  # the others, so that their memory is


class LayerRecording:
    """A layer's launches, by its own tensors and by those of the step.

    They are of no use to other layers where one is not prepared, or takes a tensor that is neither: a copy, say.

    Args:
        own: addresses of the layer's tensors; 0: none.
        storages: addresses of its tensors' memory, and of the step's.
    """

    def __init__(self, own: list[int], storages: set[int], of_step: set[int]) -> None:
        given = [address for address in own if address]
        self._own = {address: i for i, address in enumerate(own) if address}
        self._of_step = of_step
        self._is_useful = len(self._own) == len(given) and not storages & of_step
        self._launches: list[_Launch] = []

    def refuse(self) -> None:
        self._is_useful = False

    def add(
        self, found: KernelForm | None, grid: tuple[int, ...], tensors: Sequence[torch.Tensor], addresses: list[int],
        varying: tuple[float, ...], descriptors: tuple[Any, ...],
    ) -> None:  # fmt: skip
        own = [(i, self._own[address]) for i, address in enumerate(addresses) if address in self._own]
        kept = [tensor for tensor, address in zip(tensors, addresses, strict=True) if address not in self._own]
        bases = [0 if each is None else each.base.data_ptr() for each in descriptors]
        is_known = all(not base or base in self._own for base in bases) and {*map(_storage, kept)} <= self._of_step
        if found is None or found.prepared is None or not is_known:
            self._is_useful = False
            return
        without_base = tuple(None if each is None else _Descriptor(each.shape, each.strides) for each in descriptors)
        described = [self._own.get(base, -1) for base in bases]
        words = found.prepared.as_words(varying)
        self._launches.append(_Launch(found.prepared, grid, addresses, own, words, without_base, described, kept))

    def made(self) -> LayerLaunches | None:
        return LayerLaunches(self._launches) if self._is_useful and self._launches else None


class _Descriptor(NamedTuple):
    shape: Sequence[int]
    strides: Sequence[int]


class LayerLaunches:
    """Launches that a layer with other tensors, which lie alike, can start."""

    def __init__(self, launches: list[_Launch]) -> None:
        self._launches, self._thread = launches, get_ident()

    def start(self, addresses: list[int]) -> bool:
        """Start all with the addresses of a layer's tensors (0: none). False: nothing is started, as these are not
        multiples of 16, or it is another thread's launches, or some profiler wants to be told of each."""
        if reduce(or_, addresses) % ALIGNED or get_ident() != self._thread or describes_launches():
            return False
        stream = current_stream()
        for prepared, grid, given, own, varying, descriptors, described, _kept in self._launches:
            for i, which in own:
                given[i] = addresses[which]
            prepared.start(grid, stream, given, varying, descriptors, [addresses[which] for which in described])
        return True


class Repeats:
    """What the layers of one step have started, by how their tensors lie."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, LayerLaunches | None] = {}

    def run(
        self, layer: Hashable, tensors: Sequence[torch.Tensor | None], of_step: Callable[[], Iterable[torch.Tensor]],
        call: Callable[[], object],
    ) -> None:  # fmt: skip
        """Do what `call` does.

        Args:
            layer: equal for layers that differ in `tensors` alone.
            tensors: all that a call reads and writes that is not of the step.
            of_step: all that is.
            call: starts kernels, and does nothing else that another layer would have to.
        """
        if INTERPRETED or LISTING.get() is not None:
            call()
            return
        form = (layer, *(None if each is None else (each.shape, each.stride(), each.dtype) for each in tensors))
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        kept = self._kept.get(form)
        if kept is not None and kept.start(addresses):
            return
        if form in self._kept or reduce(or_, addresses) % ALIGNED:
            call()
            return
        storages = {_storage(each) for each in tensors if each is not None}
        recording = LayerRecording(addresses, storages, {*map(_storage, of_step())})
        token = RECORDING.set(recording)
        try:
            call()
        finally:
            RECORDING.reset(token)
        self._kept[form] = recording.made()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
