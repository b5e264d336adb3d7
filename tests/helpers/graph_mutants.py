"""Ways to break the graph side of any backend, at seams that all have: batches, `graph_capture`, clones, steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface import AttentionBackend
from attn_backends.testing.graphs.reachable import tensors_of
from tests.helpers.mutants import with_seq_lens

Backend = type[AttentionBackend]
Common = CommonAttentionMetadata
Begin = Callable[[Any], Any]  # a clone's begin_forward


def broken(backend: Backend, *, builder: type | None = None, state: type | None = None) -> Backend:
    """The backend with another builder or state."""
    body = {
        "builder_cls": builder or backend.get_builder_cls(),
        "state_cls": state or backend.get_state_cls(),
    }
    return type("Broken", (backend,), body)


def other_begin(backend: Backend, around: Callable[[Begin, Any, int, Any], Any]) -> Backend:
    """`around(begin_forward, clone, batch_size, metadata)` stands in for the `begin_forward` of every clone."""

    class State(backend.get_state_cls()):  # type: ignore[misc]
        def graph_clone(self, batch_size: int, query_len: int = 1) -> Any:
            clone = super().graph_clone(batch_size, query_len)
            clone.begin_forward = functools.partial(around, clone.begin_forward, clone, batch_size)
            return clone

    return broken(backend, state=State)


def other_graph_batch(backend: Backend, change: Callable[[Common], Common], at_capture: bool) -> Backend:
    """The builder is handed another batch; at capture too, or at replay alone."""

    class Builder(backend.get_builder_cls()):  # type: ignore[misc]
        is_capturing = False

        def build(self, common_prefix_len: int, common: Common, fast_build: bool = False) -> Any:
            changed = change(common) if at_capture or not self.is_capturing else common
            return super().build(common_prefix_len, changed, fast_build)

        def build_for_cudagraph_capture(self, common: Common) -> Any:
            self.is_capturing = True
            metadata = super().build_for_cudagraph_capture(common)
            self.is_capturing = False
            return metadata

    return broken(backend, builder=Builder)


def fresh_tensors(backend: Backend) -> Backend:
    """1. The step's metadata holds copies, made anew each time, and not the persistent buffers."""

    def around(begin: Begin, clone: Any, size: int, metadata: Any) -> Any:
        step = begin(metadata)
        return replace(step, metadata=_copied(step.metadata))

    return other_begin(backend, around)


def rebound_buffers(backend: Backend) -> Backend:
    """1, the other way. Every fill but the first puts new tensors in the place of the clone's."""

    def around(begin: Begin, clone: Any, size: int, metadata: Any) -> Any:
        if hasattr(clone, "filled_once"):
            for name, held in list(vars(clone).items()):
                setattr(clone, name, _copied(held))
        clone.filled_once = True
        return begin(metadata)

    return other_begin(backend, around)


def plan_of_the_warm_up(backend: Backend) -> Backend:
    """2. Whatever the clone has under a name with "plan" stays as the first fill made it."""
    plans: dict[int, dict[str, torch.Tensor]] = {}

    def around(begin: Begin, clone: Any, size: int, metadata: Any) -> Any:
        step = begin(metadata)
        now = {path: tensor for path, tensor in tensors_of([clone]).items() if "plan" in path}
        assert now, "no tensor of this clone is called a plan"
        first = plans.setdefault(id(clone), {path: tensor.clone() for path, tensor in now.items()})
        for path, tensor in now.items():
            tensor.copy_(first[path])
        return step

    return other_begin(backend, around)


def smaller_buffers(backend: Backend) -> Backend:
    """3. The buffers have room for half of the capture size."""

    class State(backend.get_state_cls()):  # type: ignore[misc]
        def graph_capture(self, max_batch_size: int, inputs: Any = None) -> Any:
            return super().graph_capture(max_batch_size // 2, inputs)

    return broken(backend, state=State)


def baked_in_length(backend: Backend) -> Backend:
    """4. The builder does not know that it builds for a graph, and uses the batch's longest length."""
    return other_graph_batch(backend, lambda common: replace(common, for_graph=False), at_capture=True)


def stale_rows(backend: Backend) -> Backend:
    """5. Rows behind the live ones, of one token each, keep what the last batch left there."""

    def around(begin: Begin, clone: Any, size: int, metadata: Any) -> Any:
        before = {path: tensor.clone() for path, tensor in tensors_of([clone]).items()}
        step = begin(metadata)
        live = int((metadata.slot_mapping >= 0).sum())  # counts say nothing: those of a graph may include padded rows
        for path, tensor in tensors_of([clone]).items():
            if tensor.shape[:1] == (size,):
                tensor[live:] = before[path][live:]
        return step

    return other_begin(backend, around)


def live_padding(backend: Backend) -> Backend:
    """6. Padded rows write beside the first row's new token, where its last cached key is."""

    def change(common: Common) -> Common:
        slots = common.slot_mapping
        return replace(common, slot_mapping=torch.where(slots < 0, slots[0] ^ 1, slots))

    return other_graph_batch(backend, change, at_capture=True)


def two_fills(backend: Backend) -> Backend:
    """7. The fill at replay forgets that this step's token is a key too; the fill at capture does not."""

    def change(common: Common) -> Common:
        return replace(with_seq_lens(common, (common.seq_lens_cpu - 1).clamp_min(0)), for_graph=common.for_graph)

    return other_graph_batch(backend, change, at_capture=False)


def workspace_of_the_first_group(backend: Backend) -> Backend:
    """8. The state is sized for the first group alone."""

    class State(backend.get_state_cls()):  # type: ignore[misc]
        def __init__(self, groups: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(groups[:1], *args, **kwargs)
            self.groups = tuple(groups)

    return broken(backend, state=State)


def shared_clones(backend: Backend) -> Backend:
    """9. A second clone of a size is the first one, whichever ubatch asks."""
    clones: dict[tuple[int, int], Any] = {}

    class State(backend.get_state_cls()):  # type: ignore[misc]
        def graph_clone(self, batch_size: int, query_len: int = 1) -> Any:
            clone = super().graph_clone(batch_size, query_len)
            return clones.setdefault((batch_size, query_len), clone)

    return broken(backend, state=State)


def _copied(value: Any) -> Any:
    """The same with every tensor in it copied; containers and dataclasses are made anew, other objects kept."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _copied(getattr(value, field.name)) for field in fields(value)})
    return value
