"""Emulated and real wrappers on the same inputs agree: outputs, LSEs and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.testing.harness import output_error
from tests.emulated import flashinfer as emulated

pytestmark = pytest.mark.gpu

PAGE_SIZE, HEADS, KV_HEADS, DIM, PAGES = 16, 8, 2, 64, 64
LENS = {  # query lengths, and lengths of keys
    "decode": ((1, 1, 1, 1), (33, 16, 1, 200)),
    "chunks": ((5, 1, 17, 40), (33, 16, 17, 200)),
    "long": ((130, 90), (130, 200)),
    "idle rows": ((1, 1, 1), (20, 0, 7)),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"sm_scale": 0.3},
    "window": {"window_left": 15},
    "soft cap": {"logits_soft_cap": 1.5},
}

RUNS = [
    ("decode", "decode"),
    ("decode", "decode tc"),
    ("idle rows", "decode"),
    ("idle rows", "decode tc"),
    ("chunks", "fa2"),
    ("long", "fa3"),
]


@pytest.fixture(scope="module")
def real() -> Any:
    return pytest.importorskip("flashinfer")


class Case:
    """One batch, its tensors on both devices."""

    def __init__(self, lens: str, dtype: torch.dtype) -> None:
        query_lens, kv_lens = LENS[lens]
        generator = torch.Generator().manual_seed(len(lens))
        self.dtype = dtype
        self.qo_indptr = torch.tensor([0, *query_lens]).cumsum(0).int()
        used = [-(-n // PAGE_SIZE) for n in kv_lens]
        self.indptr = torch.tensor([0, *used]).cumsum(0).int()
        self.indices = torch.randperm(PAGES, generator=generator)[: sum(used)].int()
        self.last = torch.tensor([(n - 1) % PAGE_SIZE + 1 if n else 0 for n in kv_lens]).int()
        self.query = torch.randn(sum(query_lens), HEADS, DIM, generator=generator).to(dtype)
        self.cache = tuple(torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM, generator=generator).to(dtype) for _ in "kv")

    def planned(self, module: Any, device: str, kind: str, rules: dict[str, Any]) -> Any:
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        pages = (self.indptr, self.indices.to(device), self.last)
        shape = (HEADS, KV_HEADS, DIM, PAGE_SIZE)
        if kind.startswith("decode"):
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=kind.endswith("tc"))
            wrapper.plan(*pages, *shape, **types, **rules)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kind)
            wrapper.plan(self.qo_indptr, *pages, *shape, causal=True, **types, **rules)
        return wrapper

    def given(self, device: str) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.query.to(device), tuple(tensor.to(device) for tensor in self.cache)

    def run(self, module: Any, device: str, kind: str, rules: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.planned(module, device, kind, rules).run(*self.given(device), return_lse=True)
        return out.cpu(), lse.cpu()


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("lens", "kind"), RUNS)
def test_outputs_and_lse(real: Any, lens: str, kind: str, rules: str) -> None:
    case = Case(lens, torch.bfloat16)
    (out, lse), (expected, expected_lse) = (
        case.run(module, device, kind, RULES[rules]) for module, device in ((real, "cuda"), (emulated, "cpu"))
    )
    live = expected_lse > -1e4
    assert torch.equal(lse > -1e4, live), "they differ in which tokens have keys"
    assert bool((out[~live] == 0).all())
    rows = live.any(-1)
    assert output_error(out[rows], expected[rows].double()) < 2e-2
    torch.testing.assert_close(lse[live], expected_lse[live], atol=2e-2, rtol=2e-2)


def _wrong_query(wrapper: Any, query: torch.Tensor, cache: Any) -> None:
    wrapper.run(query[:-1], cache)


def _wrong_dtype(wrapper: Any, query: torch.Tensor, cache: Any) -> None:
    wrapper.run(query.half(), cache)


def _wrong_window(wrapper: Any, query: torch.Tensor, cache: Any) -> None:
    wrapper.run(query, cache, window_left=3)


def _wrong_out(wrapper: Any, query: torch.Tensor, cache: Any) -> None:
    wrapper.run(query, cache, out=query.float())


@pytest.mark.parametrize("wrong", [_wrong_query, _wrong_dtype, _wrong_window, _wrong_out])
@pytest.mark.parametrize("kind", ["decode", "decode tc", "fa2"])
def test_refusals(real: Any, kind: str, wrong: Any) -> None:
    case, raised = Case("decode", torch.bfloat16), []
    for module, device in ((real, "cuda"), (emulated, "cpu")):
        wrapper, given = case.planned(module, device, kind, {}), case.given(device)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which it is, is what is compared)
            wrong(wrapper, *given)
        raised.append(caught.type)
    assert raised[0] is raised[1]
