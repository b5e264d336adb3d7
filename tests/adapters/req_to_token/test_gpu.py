"""The req_to_token convention on a GPU, eager and in CUDA graphs, over the backends that serve pages of one token."""

from __future__ import annotations

import pytest
import torch

from attn_backends import get_backend
from attn_backends.adapters.req_to_token.batch import ForwardMode
from attn_backends.registry.table import BackendImportError
from attn_backends.testing.graphs.harness import make_recorder
from tests.helpers.req_to_token_engine import CROSS, DECODE, EXTEND, FULL, MIXED, VERIFY, Engine, GraphRunner, filled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.parametrize("name", ["FLASHINFER", "TRITON"]),
]


@pytest.fixture(autouse=True)
def _importable(name: str) -> None:
    try:
        get_backend(name)
    except BackendImportError as error:
        pytest.skip(str(error))


def test_requests_from_prompt_to_decode(name: str) -> None:
    engine = filled(name, 7, 1, 12, device="cuda")
    engine.run(DECODE, [(1, 1), (0, 1)])
    engine.run(EXTEND, [(2, 5), (0, 3)])
    engine.run(ForwardMode.MIXED, [(2, 4), (1, 1), (0, 1)])
    for _ in range(3):
        engine.run(DECODE, [(0, 1), (2, 1), (1, 1)])
    engine.run(VERIFY, [(0, 3), (1, 3)])
    engine.forget(0, 2)
    engine.run(DECODE, [(0, 1), (1, 1)])


def test_cross_attention(name: str) -> None:
    engine = Engine(name, CROSS, device="cuda")
    for request, encoder_len in enumerate((5, 0, 9)):
        engine.enter(request, encoder_len)
    engine.run(EXTEND, [(0, 4), (1, 6)])
    engine.run(EXTEND, [(2, 3), (0, 2)])
    engine.run(DECODE, [(2, 1), (1, 1), (0, 1)])


@pytest.mark.parametrize("layers", [MIXED, (FULL,)], ids=["mixed", "full"])
def test_graphs(name: str, layers: tuple[object, ...]) -> None:
    """Sizes in turns, rows that come and go, eager steps between, drafts that are taken back."""
    engine = filled(name, 7, 2, 12, 1, layers=layers, device="cuda")  # type: ignore[arg-type]
    engine.adapter.init_cuda_graph_state(4, 12)
    recorder = make_recorder("cuda")
    verify, large, small = (GraphRunner(engine, *size, recorder) for size in ((4, 3), (4, 1), (2, 1)))
    engine.check_pool()
    large.run([(0, 1), (1, 1), (2, 1), (3, 1)])
    small.run([(3, 1)])
    verify.run([(0, 3), (1, 3), (2, 3)])
    engine.forget(1, 2)
    large.run([(2, 1)])
    engine.run(EXTEND, [(3, 6), (0, 2)])
    verify.run([(1, 3)])
    small.run([(0, 1), (3, 1)])
