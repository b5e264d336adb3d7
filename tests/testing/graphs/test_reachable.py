"""What a walk finds, and under which path."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.testing.graphs.reachable import Place, address, is_host_path, tensors_of, walk


class Slotted:
    __slots__ = ("empty", "kept")

    def __init__(self) -> None:
        self.kept = torch.ones(1)


@dataclass
class Held:
    table: torch.Tensor = field(default_factory=lambda: torch.zeros(2))
    by_name: dict[str, Any] = field(default_factory=lambda: {"a": [torch.ones(1), 7]})
    slotted: Slotted = field(default_factory=Slotted)
    cache: KVCache = field(default_factory=lambda: KVCache(torch.zeros(1), torch.zeros(1)))


class Colour(enum.Enum):
    RED = 1


def test_paths_are_expressions() -> None:
    held = Held()
    found = dict(walk([held]))
    assert set(found) == {
        "persistent[0].table",
        "persistent[0].by_name['a'][0]",
        "persistent[0].by_name['a'][1]",
        "persistent[0].slotted.kept",
        "persistent[0].cache.key",
        "persistent[0].cache.value",
    }
    for path, value in found.items():
        assert eval(path, {"persistent": [held]}) is value


def test_modules_show_parameters_buffers_and_children() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    module.register_buffer("scale", torch.ones(1))
    names = set(tensors_of([module]))
    assert names == {"persistent[0].0.weight", "persistent[0].0.bias", "persistent[0].scale"}


def test_circles_code_and_closed_classes_end_the_walk() -> None:
    held = Held()
    held.by_name = {"self": held, "code": [test_paths_are_expressions, Held, torch, Colour.RED, "text"], "number": 3}
    assert dict(walk([held], closed=(Slotted, KVCache))) == {
        "persistent[0].table": held.table,
        "persistent[0].by_name['number']": 3,
    }


@pytest.mark.parametrize(
    ("path", "is_host"),
    [
        ("persistent[0].seq_lens_cpu", True),
        ("persistent[0]['seq_lens_cpu'][0]", True),
        ("persistent[0].seq_lens", False),
        ("persistent[0]._cpu_count", False),
    ],
)
def test_host_paths(path: str, is_host: bool) -> None:
    assert is_host_path(path) == is_host


def test_places_and_addresses() -> None:
    tensor = torch.zeros(4, 2)
    assert address(tensor[1:]) == address(tensor) != address(tensor.clone())
    assert address(torch.zeros(0)) == 0
    assert Place.of(tensor).changes(Place.of(tensor.view(4, 2))) == ""
    changes = Place.of(tensor).changes(Place.of(tensor.t().int()))
    assert changes.startswith(
        "shape [4, 2] → [2, 4], stride [2, 1] → [1, 2], dtype torch.float32 → torch.int32, address"
    )


def test_packed_weights_have_an_address_of_their_own() -> None:
    one, other = (torch.ones(4, 4).to_mkldnn() for _ in range(2))
    assert address(one) == Place.of(one).address != address(other)
