"""The kit finds a state that says it has planned a captured size over an engine's tensors, and has not."""

from __future__ import annotations

import pytest

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.state import TorchGraphState, TorchState, TorchStep
from attn_backends.testing.conformance import BackendConformance


class Stale(TorchGraphState):
    """The last batch's tensors are in the buffers of the clone still."""

    def replan_in_place(self) -> dict[int, TorchStep] | None:
        return self.steps


class ReadsTheHost(TorchGraphState):
    """The host reads what is on the device."""

    def replan_in_place(self) -> dict[int, TorchStep] | None:
        return self.steps if int(self.steps[0].metadata.slot_mapping.max()) < -1 else None


@pytest.mark.parametrize(
    ("graph_cls", "told"), [(Stale, "planned over an engine's tensors alone"), (ReadsTheHost, "Tensor.__int__")]
)
def test_the_kit_fails_on(graph_cls: type[TorchGraphState], told: str) -> None:
    state = type("State", (TorchState,), {"graph_cls": graph_cls})
    backend = type("Broken", (TorchBackend,), {"state_cls": state})
    kit = type("Kit", (BackendConformance,), {"backend_name": "TORCH", "backend": backend})()
    with pytest.raises((AssertionError, RuntimeError), match=told):
        kit.test_graphs_over_an_engines_tensors("plain")
