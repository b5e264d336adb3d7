"""Reads of the device on the host are found, also where both are a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.host_reads import GraphViolation, forbid_host_reads
from attn_backends.testing.harness import make_layer

Read = Callable[[torch.Tensor], object]
READS: dict[str, Read] = {
    "Tensor.item": lambda x: x[0].item(),
    "Tensor.tolist": lambda x: x.tolist(),
    "Tensor.numpy": lambda x: x.numpy(),
    "Tensor.cpu": lambda x: x.cpu(),
    "Tensor.__array__": lambda x: np.asarray(x),
    "Tensor.__bool__": lambda x: bool((x > 0).all()),
    "Tensor.__int__": lambda x: int(x.sum()),
    "Tensor.__float__": lambda x: float(x.sum()),
    "Tensor.__index__": lambda x: range(x.max()),
    "Tensor.__contains__": lambda x: 3 in x,
    "aten._local_scalar_dense": lambda x: torch.full((2,), x[0]),
    "aten.allclose": lambda x: torch.allclose(x, x),
    "aten.equal": lambda x: torch.equal(x, x),
    "aten.nonzero": lambda x: torch.where(x > 0),
    "aten.masked_select": lambda x: torch.masked_select(x, x > 0),
    "aten._unique2": lambda x: torch.unique(x),
    "aten.bincount": lambda x: torch.bincount(x),
    "aten.repeat_interleave.Tensor without output_size": lambda x: torch.repeat_interleave(x, x),
    "aten.index.Tensor with a boolean mask": lambda x: x[x > 0],
    "aten.index_put_.default with a boolean mask": lambda x: x.clone().__setitem__(x > 0, torch.ones(4).long()),
}
STAYS: dict[str, Read] = {
    "arithmetic": lambda x: (x * 2 + 1).cumsum(0),
    "index": lambda x: x[x.clamp_max(3)],
    "masked_fill": lambda x: x.clone().masked_fill_(x > 1, 0),
    "one value under a mask": lambda x: x.clone().__setitem__(x > 1, 0),
    "output_size": lambda x: torch.repeat_interleave(x, x, output_size=10),
    "where": lambda x: torch.where(x > 1, x, 0),
    "shape": lambda x: len(x) + x.numel() + x.stride(0),
    "to its device": lambda x: x.to("cpu"),
}


@pytest.fixture(params=[True, False], ids=["inference", "autograd"])
def batch(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Two halves of one buffer, as a batch on a CPU has them."""
    with torch.inference_mode(request.param):
        lens = torch.arange(1, 5)
        return SimpleNamespace(seq_lens=lens[:], seq_lens_cpu=lens[:], inference=request.param)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("derived", [False, True])
def test_reads_of_the_device_are_found(name: str, derived: bool, batch: SimpleNamespace) -> None:
    with torch.inference_mode(batch.inference), forbid_host_reads("cpu", [batch]):
        tensor = batch.seq_lens[:] + 0 if derived else batch.seq_lens
        with pytest.raises(GraphViolation, match=f"^{name}.* of the device on the host: keep a host copy"):
            READS[name](tensor)


@pytest.mark.parametrize("name", READS)
def test_reads_of_host_tensors_are_free(name: str, batch: SimpleNamespace) -> None:
    with torch.inference_mode(batch.inference), forbid_host_reads("cpu", [batch]) as seen:
        READS[name](batch.seq_lens_cpu)
    assert seen.reads == []


@pytest.mark.parametrize("name", STAYS)
def test_work_on_the_device_is_free(name: str, batch: SimpleNamespace) -> None:
    with torch.inference_mode(batch.inference), forbid_host_reads("cpu", [batch]):
        STAYS[name](batch.seq_lens)


def test_copies_to_a_host_tensor_are_reads() -> None:
    held = SimpleNamespace(lens=torch.ones(3), staged_cpu=torch.zeros(3))
    with forbid_host_reads("cpu", [held]):
        held.lens.copy_(held.staged_cpu)
        with pytest.raises(GraphViolation, match="a copy to the host, reads"):
            held.staged_cpu.copy_(held.lens)


def test_what_the_device_was_copied_into_is_the_devices() -> None:
    held = SimpleNamespace(lens=torch.ones(3))
    with forbid_host_reads("cpu", [held]):
        fresh = torch.empty(6)
        fresh[:3].copy_(held.lens)
        with pytest.raises(GraphViolation, match=r"Tensor\.tolist"):
            fresh.tolist()


def test_counts_reads_and_allocations() -> None:
    held = SimpleNamespace(lens=torch.ones(3), out=torch.zeros(3))
    with forbid_host_reads("cpu", [held], count=True) as seen:
        assert held.lens.tolist() == [1, 1, 1]
        torch.add(held.lens, 1, out=held.out)
        held.out.view(3, 1).mul_(2)
        held.lens + held.out
    assert seen.reads == ["Tensor.tolist reads [3] torch.float32 of the device on the host"]
    assert seen.allocations == ["aten.add.Tensor [3] torch.float32"]


def test_a_builder_reads_host_lengths_alone() -> None:
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 16), (40, 7), (1, 1))
    builder, common = make_layer(TorchBackend, batch).builder, batch.common()
    with forbid_host_reads("cpu", [common]) as seen:
        builder.build(0, common)
    assert seen.allocations, "TORCH gathers its slots: something is allocated"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_reads_are_found_and_the_mode_comes_back() -> None:
    tensor, before = torch.ones(3, device="cuda"), torch.cuda.get_sync_debug_mode()
    with forbid_host_reads("cuda"):
        torch.ones(3).tolist()
        for read in (tensor.tolist, tensor.sum().item, tensor.cpu, lambda: tensor.to("cpu")):
            with pytest.raises(RuntimeError):
                read()
    assert torch.cuda.get_sync_debug_mode() == before
