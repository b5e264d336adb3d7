"""CUDA graphs on a CPU: capture records operations, replay runs them on the same addresses with nothing else alive.

A captured graph is a list of kernels with their arguments baked in. So is a recording: replay runs no Python of the
model, numbers stay as they were, views point where they pointed. What a GPU would have reused in between is poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from attn_backends.testing.graphs.host_reads import GraphViolation
from attn_backends.testing.graphs.reachable import Number, Place, address, is_host_path, tensors_of, walk
from attn_backends.testing.graphs.recorder import EagerCall, Input, RecordedOp, Recorder, poison


class GraphSimulator:
    """Captures graphs. All graphs that read one state come from one simulator, as they do from one memory pool.

    Args:
        refuse_unreachable: raise at capture where a graph reads tensors that nothing in `persistent` holds. Without,
            they are listed in `SimulatedGraph.unreachable`, and read as poison at replay. Writing to them is refused
            always: poison would not show it.
    """

    def __init__(self, *, refuse_unreachable: bool = False) -> None:
        self.refuse_unreachable = refuse_unreachable
        self._recorder: Recorder | None = None
        self._known: dict[int, torch.Tensor] = {}  # storage of any capture, kept so that no address is used again

    def capture(self, run: Callable[[], torch.Tensor], persistent: Sequence[object]) -> SimulatedGraph:
        """Run a function once to warm up and once to record it. The recorded run leaves nothing but the recording.

        Args:
            run: one step over static inputs; returns its output, which `replay` fills and returns.
            persistent: what stays alive and in place between replays: states, caches, models, layers, static inputs.

        Raises:
            GraphViolation: the run reads the device on the host, or brings values from there; or it writes (with
                `refuse_unreachable`: reads) what nothing holds.
        """
        run()
        recorder = self._recorder = Recorder()
        try:
            with recorder.python, recorder:
                output = run()
        finally:
            self._recorder = None
            recorder.undo()
        held = tensors_of(persistent, (SimulatedGraph, GraphSimulator))
        alive = {address(tensor): tensor for tensor in (output, *held.values())}
        self._known.update(alive)
        unreachable = {start: used for start, used in recorder.inputs.items() if start not in alive}
        refused = {s: used for s, used in unreachable.items() if used.is_written or self.refuse_unreachable}
        if refused:
            raise GraphViolation(*_reports(refused))
        return SimulatedGraph(recorder, output, persistent, unreachable, self._known)

    def cut(self, eager: Callable[[], None]) -> None:
        """Called from inside `run`: what `eager` does is not captured, and called at its place in every replay."""
        if self._recorder is None:  # the warm-up
            eager()
        else:
            self._recorder.cut(eager)


class SimulatedGraph:
    """A recording. `unreachable` lists, a line each, what it reads and nothing in `persistent` holds."""

    def __init__(
        self,
        recorder: Recorder,
        output: torch.Tensor,
        persistent: Sequence[object],
        unreachable: Mapping[int, Input],
        known: Mapping[int, torch.Tensor],
    ) -> None:
        self.output = output
        self.unreachable = _reports(unreachable)
        self._ops: Sequence[RecordedOp | EagerCall] = recorder.ops
        self._made = recorder.made
        self._inputs = recorder.inputs
        self._freed = [tensor for used in unreachable.values() for tensor in used.tensors.values()]
        self._persistent = tuple(persistent)
        self._known = known
        self._places = {path: Place.of(tensor) for path, tensor in self._tensors().items()}
        self._numbers = self._numbers_now()
        self._poison_made()

    def replay(self) -> torch.Tensor:
        """Run the recording over what the persistent tensors hold now; returns the output of the capture, refilled.

        Raises:
            GraphViolation: a persistent tensor was moved or changed its form, new storage came in, or an operation
                failed (on poison, as a rule).
        """
        found = self.violations()
        if found:
            raise GraphViolation(*found)
        with torch.inference_mode():
            saved = {address(t): (t, t.untyped_storage().clone()) for t in self._freed if address(t) > 0}
            self._poison_made()
            for tensor in self._freed:
                poison(tensor)
            try:
                for op in self._ops:
                    self._run(op)
            finally:  # others may hold them, unknown to us
                for tensor, content in saved.values():
                    tensor.untyped_storage().copy_(content)
        return self.output

    def violations(self) -> list[str]:
        """What happened to the persistent objects since capture that a graph does not survive; a line each.

        A tensor that the graph uses is not where it was, or nothing holds it any more; or there is new storage, in
        anything but a host copy (`…_cpu`). A tensor that the graph does not use may be replaced, as a step's own are.
        """
        now, found = self._tensors(), []
        alive = set(map(address, now.values()))
        for path, place in self._places.items():
            used = self._inputs.get(place.storage)
            if used is None:
                continue
            if path not in now:
                found += [] if place.storage in alive else [f"{path} is gone, and the graph uses it"]
            elif place in used.tensors or address(now[path]) != place.storage:
                changed = place.changes(Place.of(now[path]))
                found += [f"{path} moved: {changed}; fill the captured tensor in place"] if changed else []
        new = [path for path in now.keys() - self._places.keys() if address(now[path]) not in self._known]
        found += [
            f"{path} is new since capture, {list(now[path].shape)} {now[path].dtype}: allocate it before"
            for path in sorted(new)
            if address(now[path]) and not is_host_path(path)
        ]
        return found

    def changed_numbers(self) -> dict[str, tuple[Number, Number | None]]:
        """Python numbers in the persistent objects that changed: path → (at capture, now). The graph has the former."""
        now = self._numbers_now()
        return {path: (then, now.get(path)) for path, then in self._numbers.items() if then != now.get(path)}

    def _run(self, op: RecordedOp | EagerCall) -> None:
        if isinstance(op, EagerCall):
            op.run()
            return
        try:
            op.run()
        except Exception as error:
            freed = "".join(f"\n  it also reads freed memory: {line}" for line in self.unreachable)
            raise GraphViolation(f"{op.func} fails at replay: {error}{freed}") from error

    def _poison_made(self) -> None:
        with torch.inference_mode():
            for tensor in self._made.values():
                poison(tensor)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self._persistent, (SimulatedGraph, GraphSimulator))

    def _numbers_now(self) -> dict[str, Number]:
        found = walk(self._persistent, (SimulatedGraph, GraphSimulator))
        return {path: value for path, value in found if not isinstance(value, torch.Tensor)}


def _reports(unreachable: Mapping[int, Input]) -> tuple[str, ...]:
    return tuple(
        f"{used.where}, is {'written and ' if used.is_written else ''}held by nothing in `persistent`: at replay it "
        "may be freed; keep it in the state, or name its owner"
        for used in unreachable.values()
    )
