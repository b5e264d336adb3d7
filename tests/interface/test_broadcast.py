"""What vLLM V0's document asks of metadata and builders: sent to a worker in another process, and its small verbs."""

from __future__ import annotations

import multiprocessing as standard
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from attn_backends import AttentionSpec, CommonAttentionMetadata, KVCacheSpec, Limits, SequenceData, SequenceGroup
from attn_backends.backends.flashinfer.backend import FlashInferBackend
from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.metadata import TorchMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.registry import backends, get_backend
from attn_backends.registry.table import BackendImportError
from attn_backends.spec import plan_groups
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Result, assert_matches, limits_for

SPEC = AttentionSpec(4, 2, 32)


def work(sent: dict[str, Any], limits: Limits, cache: KVCacheSpec, inputs: Any, answer: Any) -> None:
    """A worker: it has a state and a layer of its own, and of the step only what was sent."""
    torch.set_num_threads(1)
    metadata = TorchMetadata.from_dict(sent)
    state = TorchBackend.get_state_cls()(plan_groups({0: SPEC}), cache, limits, "cpu")
    impl = TorchBackend.get_impl_cls()(SPEC, cache, "cpu")
    query, key, value, pool = inputs
    output = impl.forward(query, key, value, KVCache(*pool), state.begin_forward(metadata))
    answer.put(output.numpy().copy())  # by value: a tensor would be gone with this process


def test_a_driver_sends_its_metadata_to_a_worker() -> None:
    """Tensors travel in shared memory: the worker's are the driver's."""
    batch = random_batch(TorchBackend, SPEC, [1, 40, 60, 33], [1, 1, 20, 33])
    pool, limits = batch.fresh_pool(), limits_for(batch)
    assert pool is not None
    group = plan_groups({0: SPEC})[0]
    metadata = TorchBackend.get_builder_cls()(group, batch.cache, limits, "cpu").build(0, batch.common())
    sent = metadata.asdict_zerocopy()
    assert all("." not in name or name.split(".")[0] in vars(metadata) for name in sent)
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    inputs = (batch.query, batch.key, batch.value, tuple(pool))
    worker = context.Process(target=work, args=(sent, limits, batch.cache, inputs, answer))
    worker.start()
    output = torch.from_numpy(answer.get(timeout=120))
    assert_matches(Result(output, None, pool), batch, "in another process")
    worker.join(30)
    assert worker.exitcode == 0
    assert standard.active_children() == []


def test_what_is_left_out_has_to_be_given() -> None:
    batch = random_batch(TorchBackend, SPEC, [9, 4], [1, 4])
    group = plan_groups({0: SPEC})[0]
    metadata = TorchBackend.get_builder_cls()(group, batch.cache, limits_for(batch), "cpu").build(0, batch.common())
    sent = metadata.asdict_zerocopy(skip_fields={"prefill_rows"})
    assert not [name for name in sent if name.startswith("prefill_rows")]
    with pytest.raises(TypeError, match="prefill_rows"):
        TorchMetadata.from_dict(sent)
    assert TorchMetadata.from_dict(sent, prefill_rows=()).prefill_rows == ()


def test_supported_head_sizes() -> None:
    assert FlashInferBackend.get_supported_head_sizes() == [64, 128, 256]
    assert TorchBackend.get_supported_head_sizes() == []  # any
    for name in backends:
        try:
            backend = get_backend(name)
        except BackendImportError:
            continue
        assert set(backend.get_supported_head_sizes()) == set(backend.capabilities().head_dims or ())


def test_fp8_dtypes_by_vllms_names() -> None:
    named = FlashInferBackend.get_fp8_dtype_for_flashinfer
    assert named("fp8") is named("fp8_e4m3") is torch.float8_e4m3fn
    assert named("fp8_e5m2") is torch.float8_e5m2
    with pytest.raises(ValueError, match="Unrecognized FP8 dtype: auto"):
        named("auto")


def test_computed_tokens_by_vllms_name() -> None:
    rows = [SequenceGroup("a", (SequenceData(7, 1, [1]), SequenceData(0, 3, [2])))]
    common = CommonAttentionMetadata.from_sequence_groups(rows, 16)
    assert common.num_computed_tokens_cpu.tolist() == [7, 0]
    assert common.num_computed_tokens_cpu is common.context_lens_cpu
