"""Guard bands find what is written and read beyond tensors, whoever allocates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.state import TorchState
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.simulator import GraphSimulator
from attn_backends.testing.guards.guard import GuardBands, GuardError
from attn_backends.testing.harness import make_layer, run_backend

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def beyond(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """One element of a contiguous tensor's memory, counted from its first."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + place)


@pytest.mark.parametrize("place", [-1, -64, 12, 100])
@pytest.mark.parametrize("make", ["empty", "zeros", "new_empty", "full_like", "clone"])
def test_a_write_beyond_is_found_and_named(make: str, place: int) -> None:
    guards, plain = GuardBands(), torch.zeros(3, 4)
    makers = {
        "empty": lambda: torch.empty(3, 4),
        "zeros": lambda: torch.zeros(3, 4),
        "new_empty": lambda: plain.new_empty(3, 4),
        "full_like": lambda: torch.full_like(plain, 2.0),
        "clone": plain.clone,
    }
    with guards.watching():
        made = makers[make]()
    guards.check("nothing was written yet")
    made.fill_(7.0)
    guards.check("it was written itself")
    beyond(made, place).fill_(1.0)
    with pytest.raises(GuardError, match=r"the call: a tensor \[3, 4\].*test_guard.py.*were written"):
        guards.check("the call")


def test_content_is_kept() -> None:
    guards = GuardBands()
    with guards.watching():
        assert torch.equal(torch.full((2, 3), 5), torch.tensor([[5] * 3] * 2))
        assert torch.equal(torch.ones(4, dtype=torch.bool), torch.tensor([True] * 4))
    turned = torch.randn(3, 4, 5).permute(2, 0, 1)
    placed = guards.place(turned)
    assert torch.equal(placed, turned)
    assert placed.stride() == turned.stride()
    assert placed.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_beyond_and_fresh_memory_are_nan(dtype: torch.dtype) -> None:
    guards = GuardBands()
    with guards.watching():
        fresh = torch.empty(6, dtype=dtype)
    placed = guards.place(torch.ones(6).to(dtype))
    for tensor in (fresh, beyond(fresh, -1), beyond(fresh, 6), beyond(placed, -3), beyond(placed, 9)):
        assert bool(tensor.float().isnan().all())


def test_workspaces_in_bytes_are_nan_as_any_float() -> None:
    with GuardBands().watching():
        workspace = torch.empty(64, dtype=torch.uint8)
    for dtype in DTYPES:
        assert bool(workspace.view(dtype).float().isnan().all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reads_beyond_integers_are_a_page_of_nobody(dtype: torch.dtype) -> None:
    guards = GuardBands(beyond=11)
    placed = guards.place(torch.arange(5, dtype=dtype))
    assert int(beyond(placed, 5)) == int(beyond(placed, -1)) == 11
    assert int(beyond(guards.place(torch.arange(5, dtype=dtype), beyond=176), 7)) == 176


def test_inputs_must_not_change() -> None:
    guards = GuardBands()
    given = guards.place(torch.randn(4, 5), read_only=True)
    given.mul_(1.0)
    guards.check("it is as it was")
    given[2, 3] += 1
    with pytest.raises(GuardError, match="it is an input, and was changed itself"):
        guards.check("the call")


def test_what_was_freed_is_compared_once_and_then_forgotten() -> None:
    guards = GuardBands()
    with guards.watching():
        made = torch.empty(8)
    beyond(made, 8).fill_(0)
    del made
    with pytest.raises(GuardError):
        guards.check("a tensor that lived within the call alone")
    with guards.watching():
        made = torch.empty(8)
        view = made[2:]
    guards = GuardBands()
    with guards.watching():
        view = torch.empty(8)[2:]
    guards.check("first")
    beyond(view, 6).fill_(0)
    with pytest.raises(GuardError):
        guards.check("a view keeps its border")


def test_replays_of_a_recorded_step_are_guarded() -> None:
    """Where it writes is known at replay alone."""
    guards = GuardBands()
    with guards.watching():
        output, place = torch.zeros(4), torch.zeros(1, dtype=torch.int64)

    def step() -> torch.Tensor:
        output.as_strided((8,), (1,)).index_fill_(0, place, 1.0)
        return output

    with guards.watching():
        graph = GraphSimulator().capture(step, [output, place])
    graph.replay()
    guards.check("a replay within it")
    place.fill_(6)
    graph.replay()
    with pytest.raises(GuardError, match=r"\[4\] torch.float32"):
        guards.check("a replay beyond it")


class ShortWorkspace(TorchState):
    """A third party's state: its workspace is one row too short, and its neighbour is whatever lies there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own_rows = torch.empty(self.limits.max_num_requests - 1, 8)

    def begin_forward(self, metadata: Any) -> Any:
        rows = metadata.slot_mapping.shape[0]
        self.own_rows.as_strided((rows, 8), (8, 1)).fill_(1.0)
        return super().begin_forward(metadata)


def decodes(backend: Any) -> Batch:
    return random_batch(backend, AttentionSpec(32, 8, 128), [40, 50, 60], [1, 1, 1])


def test_a_workspace_of_a_state_is_guarded() -> None:
    short = type("Short", (TorchBackend,), {"state_cls": ShortWorkspace})
    with pytest.raises(
        GuardError, match=r"\[2, 8\] torch.float32 on cpu, allocated in test_guard.py.* 32 bytes behind"
    ):
        run_backend(short, decodes(short))


def test_a_batch_is_guarded() -> None:
    batch = decodes(TorchBackend)
    layer = make_layer(TorchBackend, batch)
    step = layer.begin(batch)
    beyond(step.metadata.slot_mapping, 3).fill_(0)
    with pytest.raises(GuardError, match=r"an input \[3\] torch.int64"):
        layer.forward(batch, step)
