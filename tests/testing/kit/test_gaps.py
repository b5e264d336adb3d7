"""The kit on a backend that declares very little: every gap passes by its refusal, and none is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.state import TorchState
from attn_backends.interface.capabilities import Capabilities, Rejection, Unsupported
from attn_backends.registry import table
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.quick_check import quick_check
from tests.helpers.quick_native import quick_native


@pytest.fixture(autouse=True, scope="module")
def _whose_kernels_others_test() -> Iterator[None]:
    with quick_native():
        yield


class PoorImpl(TorchImpl):
    def forward(self, *args: Any, lse: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if lse is not None:
            raise Unsupported("POOR", [Rejection("lse", "lse=", "None", "Choose a backend with LSE.")])
        return super().forward(*args, **kwargs)


class PoorState(TorchState):
    backend_name = "POOR"
    graph_cls = None


class PoorBackend(TorchBackend):
    """Plain causal attention in float32 and bfloat16, head_dim 64 or 128, pages of 32, HND."""

    name = "POOR"
    impl_cls = PoorImpl
    state_cls = PoorState

    @staticmethod
    def capabilities() -> Capabilities:
        floats = frozenset({torch.float32, torch.bfloat16})
        return Capabilities(
            devices=frozenset({"cpu"}),
            dtypes=floats,
            cache_dtypes=floats,
            head_dims=frozenset({64, 128}),
            page_sizes=frozenset({32, 64}),
            layouts=frozenset({"HND"}),
        )


@pytest.mark.sampled
class TestPoor(BackendConformance):
    backend_name = "POOR"
    backend = PoorBackend  # pytest asks for its dtypes while it collects, before it is registered

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Known to the registry for the length of a test."""
        monkeypatch.setitem(
            table._rows(), "POOR", table.BackendEntry("POOR", "tests.testing.kit.test_gaps:PoorBackend")
        )
        monkeypatch.setitem(table._classes, "POOR", PoorBackend)


def test_quick_check_counts_refusals_as_ok() -> None:
    results = quick_check(PoorBackend)
    assert all(result.ok for result in results), results
    assert sum(result.detail.startswith("refused") for result in results) >= 10
