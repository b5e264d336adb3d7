"""Capture and replay of plain functions: what is frozen, what is poisoned, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from attn_backends.testing.graphs.host_reads import GraphViolation
from attn_backends.testing.graphs.recorder import WRONG_INTEGER, poison
from attn_backends.testing.graphs.simulator import GraphSimulator, SimulatedGraph
from tests.testing.graphs.test_host_reads import READS, STAYS

Held = SimpleNamespace
Run = Callable[[], torch.Tensor]


def capture(run: Run, *persistent: object) -> SimulatedGraph:
    return GraphSimulator().capture(run, persistent)


@pytest.fixture(params=[True, False], ids=["inference", "autograd"], autouse=True)
def _inference(request: pytest.FixtureRequest) -> object:
    with torch.inference_mode(request.param):
        yield


def test_replay_follows_inputs_through_views_in_place_and_out() -> None:
    held = Held(x=torch.zeros(2, 3), weight=torch.randn(3, 3), out=torch.zeros(2, 3))

    def run() -> torch.Tensor:
        rows = torch.nn.functional.linear(held.x, held.weight).view(3, 2).t()  # a view of what was made
        rows[0] = 1.5
        rows += held.x.sum()
        torch.mul(rows, 2, out=held.out)
        return held.out[:, :2]

    graph = capture(run, held)
    for _ in range(3):
        held.x.normal_()
        got = graph.replay()
        assert got is graph.output
        torch.testing.assert_close(got.clone(), run())


def test_capture_runs_nothing() -> None:
    held = Held(count=torch.zeros(2), x=torch.ones(1))

    def run() -> torch.Tensor:
        held.count[1:].add_(held.x)
        return held.count + held.x

    graph = capture(run, held)
    assert held.count.tolist() == [0, 1], "the warm-up counts, the capture does not"
    assert graph.output.isnan().all()
    assert graph.replay().tolist() == [1, 3]


def test_numbers_are_frozen_and_can_be_listed() -> None:
    held = Held(x=torch.ones(2), factor=2, unused=5)
    graph = capture(lambda: held.x * held.factor, held)
    held.factor = 3
    assert graph.replay().tolist() == [2, 2]
    assert graph.changed_numbers() == {"persistent[0].factor": (2, 3)}


def test_temporaries_are_poisoned_between_replays() -> None:
    """What `empty` gives, and what the last replay left in it, is never a right answer."""
    held = Held(x=torch.ones(2))

    def run() -> torch.Tensor:
        room = torch.empty(3)
        room[:2] = held.x
        return room

    got = capture(run, held).replay()
    assert got[:2].tolist() == [1, 1]
    assert got[2].isnan()


def test_what_nothing_holds_is_poison_at_replay_and_unharmed_after() -> None:
    held, lost = Held(x=torch.ones(2)), torch.ones(2)
    graph = capture(lambda: held.x + lost[1:], held)
    assert len(graph.unreachable) == 1
    assert "tensor 1 of aten.add.Tensor, [1] torch.float32, in test_simulator.py" in graph.unreachable[0]
    assert graph.replay().isnan().all()
    assert lost.tolist() == [1, 1]
    assert not capture(lambda: held.x + lost[1:], held, [lost]).replay().isnan().any()


def test_a_lost_index_is_an_error_at_replay() -> None:
    held, lost = Held(x=torch.ones(2)), torch.zeros(1, dtype=torch.int32)
    graph = capture(lambda: held.x.index_select(0, lost), held)
    with pytest.raises(GraphViolation, match=r"index_select.default fails at replay: .*\n.*freed memory: tensor 1 of"):
        graph.replay()
    assert lost.tolist() == [0]


def test_writing_to_what_nothing_holds_is_refused() -> None:
    held, lost = Held(x=torch.ones(2)), torch.zeros(2)
    with pytest.raises(GraphViolation, match="is written and held by nothing"):
        capture(lambda: lost.copy_(held.x) + 1, held)
    assert capture(lambda: lost.copy_(held.x), held).replay().tolist() == [1, 1], "its output is held by the graph"


def test_reading_what_nothing_holds_can_be_refused() -> None:
    held, lost = Held(x=torch.ones(2)), torch.zeros(2)
    with pytest.raises(GraphViolation, match="is held by nothing"):
        GraphSimulator(refuse_unreachable=True).capture(lambda: held.x + lost, [held])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda held: setattr(held, "x", held.x.clone()), r"persistent\[0\]\.x moved: address"),
        (lambda held: setattr(held, "x", held.x[:1]), r"persistent\[0\]\.x moved: shape \[4\] → \[1\]"),
        (lambda held: setattr(held, "x", held.x.int()), r"persistent\[0\]\.x moved: dtype torch.int64 → torch.int32"),
        (lambda held: setattr(held, "x", None), r"persistent\[0\]\.x is gone"),
        (lambda held: setattr(held, "more", {"y": torch.ones(1)}), r"persistent\[0\]\.more\['y'\] is new since"),
    ],
)
def test_what_moved_is_named(change: Callable[[Held], None], found: str) -> None:
    held = Held(x=torch.ones(4, dtype=torch.int64))
    graph = capture(lambda: held.x * 2, held)
    assert graph.violations() == []
    change(held)
    with pytest.raises(GraphViolation, match=found) as caught:
        graph.replay()
    assert list(caught.value.found) == graph.violations()


def test_what_the_graph_does_not_use_may_change() -> None:
    """Host copies, views of what it uses, a step's own tensors at the path of the last step's."""
    held = Held(x=torch.ones(4), step=torch.ones(2), again=None)
    held.again, held.part = held.x, held.x[:1]
    graph = capture(lambda: held.x * 2, held)
    held.view, held.part, held.step, held.more_cpu = held.x[1:], held.x[:2], torch.ones(3), torch.ones(2)
    del held.again
    assert graph.replay().tolist() == [2, 2, 2, 2]


def test_a_host_copy_that_the_graph_reads_may_not_move() -> None:
    held = Held(x=torch.ones(2), lens_cpu=torch.ones(2))
    graph = capture(lambda: held.x.copy_(held.lens_cpu), held)
    held.lens_cpu = torch.zeros(2)
    with pytest.raises(GraphViolation, match=r"persistent\[0\]\.lens_cpu moved"):
        graph.replay()


def test_captures_of_one_simulator_may_allocate_in_turn() -> None:
    simulator, held = GraphSimulator(), Held(x=torch.ones(2), by_size={})
    graphs = []
    for size in (2, 1):
        held.by_size[size] = torch.zeros(size)
        graphs.append(simulator.capture(lambda size=size: held.by_size[size].copy_(held.x[:size]), [held]))
    held.graphs = graphs
    assert [graph.replay().tolist() for graph in graphs] == [[1, 1], [1]]
    held.by_size[3] = torch.zeros(3)
    assert [len(graph.violations()) for graph in graphs] == [1, 1]


@pytest.mark.parametrize("name", READS)
def test_host_reads_are_refused(name: str) -> None:
    held = Held(x=torch.arange(1, 5))

    def run() -> torch.Tensor:
        READS[name](held.x)
        return held.x

    with pytest.raises(GraphViolation, match=f"^{name}.* on the host while a graph is captured, in test_host_reads.py"):
        capture(run, held)


@pytest.mark.parametrize(
    "make", [lambda: torch.tensor(1), lambda: torch.as_tensor([1]), lambda: torch.zeros(3)[[0, 1]]]
)
def test_values_from_the_host_are_refused(make: Callable[[], object]) -> None:
    held = Held(x=torch.ones(1))

    def run() -> torch.Tensor:
        make()
        return held.x

    with pytest.raises(GraphViolation, match="values on the host while a graph is captured"):
        capture(run, held)


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_on_the_device_is_captured(name: str) -> None:
    held = Held(x=torch.arange(1, 5))

    def run() -> torch.Tensor:
        result = STAYS[name](held.x)
        return result if isinstance(result, torch.Tensor) else held.x

    graph = capture(run, held)
    held.x.copy_(held.x.flip(0))
    assert graph.replay().tolist() == run().tolist()


def test_packed_weights() -> None:
    weight = torch.randn(8, 4)
    held = Held(x=torch.zeros(2, 4), packed=torch.ops.mkldnn._reorder_linear_weight(weight, 2))
    graph = capture(lambda: torch.ops.mkldnn._linear_pointwise(held.x, held.packed, None, "none", [], ""), held)
    assert graph.unreachable == ()
    held.x.normal_()
    torch.testing.assert_close(graph.replay().clone(), held.x @ weight.t())
    held.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
    with pytest.raises(GraphViolation, match=r"persistent\[0\]\.packed moved"):
        graph.replay()


@torch.library.custom_op("attn_backends_test::add_to", mutates_args=["total"], device_types="cpu")
def add_to(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """A kernel, as far as a graph can tell: what it does within is its own affair. Returns the old total, doubled."""
    before = total * 2
    total.numpy()[:] += more.numpy()
    return before


def test_a_kernel_is_recorded_whole() -> None:
    held = Held(x=torch.ones(2), total=torch.zeros(2))
    graph = capture(lambda: torch.ops.attn_backends_test.add_to(held.total, held.x), held)
    assert held.total.tolist() == [1, 1], "only the warm-up adds"
    held.x.fill_(3)
    assert graph.replay().tolist() == [2, 2]
    assert held.total.tolist() == [4, 4]


calls_of_halved: list[int] = []


@torch.library.custom_op("attn_backends_test::halved", mutates_args=[])
def halved(tensor: torch.Tensor, read: bool) -> torch.Tensor:
    """A hole in a compiled model, of which a graph captures what is launched within."""
    calls_of_halved.append(1)
    return tensor / (tensor[0].item() if read else 2)


def test_an_operation_for_all_devices_is_looked_into() -> None:
    held = Held(x=torch.ones(2))
    graph = capture(lambda: torch.ops.attn_backends_test.halved(held.x, False), held)
    held.x.fill_(6)
    calls_of_halved.clear()
    assert graph.replay().tolist() == [3, 3]
    assert calls_of_halved == [], "replay runs no Python"
    with pytest.raises(GraphViolation, match=r"^aten\._local_scalar_dense"):
        capture(lambda: torch.ops.attn_backends_test.halved(held.x, True), held)


def test_a_cut_runs_eager_python_at_its_place() -> None:
    simulator, calls = GraphSimulator(), []
    held = Held(x=torch.ones(2), between=torch.zeros(2))

    def run() -> torch.Tensor:
        made = held.x * 2

        def eager() -> None:
            calls.append(made.tolist())
            held.between.copy_(made + 1)

        simulator.cut(eager)
        return held.between * 10

    graph = simulator.capture(run, [held])
    held.x.fill_(3)
    assert graph.replay().tolist() == [70, 70]
    assert calls == [[2, 2], [2, 2], [6, 6]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_of_floats_is_nan(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    poison(tensor)
    assert tensor.float().isnan().all()


def test_poison_of_the_others_shows() -> None:
    for dtype, wrong in ((torch.int32, WRONG_INTEGER), (torch.int64, WRONG_INTEGER), (torch.bool, True)):
        tensor = torch.zeros(2, dtype=dtype)
        poison(tensor)
        assert tensor.tolist() == [wrong, wrong]
    room = torch.zeros(8, dtype=torch.uint8)
    poison(room)
    assert all(room.view(dtype).float().isnan().all() for dtype in (torch.float32, torch.float16, torch.float64))
