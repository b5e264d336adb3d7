"""Host time of the vLLM adapter with TRITON behind it: a step's `build`, and a layer's `forward`.

    python -m benchmarks host vllm_adapter [--requests 1 32 256]

A step that vLLM replays as a full graph costs the host `build`; any other costs a `forward` a layer besides. Neither a
GPU nor vLLM is needed: what the adapter imports of vLLM are stand-ins, tensors of the device are shapes without memory
(torch's "meta") but for a layer's own, which have addresses, and kernels are found as those that are compiled already,
but a launch does nothing. So times are those of Python and of torch's own calls. "first" is a step's first layer, whose
launches those behind it repeat. "launches" counts what a driver's time would come on top for: operators that run or
copy on the device, and kernels of ours. The batches are vLLM's: rows of zero tokens behind the others, lengths on the
host as upper bounds.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lib.harness import report
from benchmarks.lib.without_gpu import StandIn, kernels_without_a_gpu

DEVICE = torch.device("meta")
PAGE_SIZE, CONTEXT, MAX_LEN = 16, 384, 8192
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30  # SmolLM2-135M's
WARMUP = 100
ENUMERATED = {"NEVER": 0, "UNIFORM_SINGLE_TOKEN_DECODE": 1, "UNIFORM_BATCH": 2, "ALWAYS": 3}
MetadataT = TypeVar("MetadataT")


class Base(Generic[MetadataT]):
    """In the place of vLLM's base classes, which keep what they are made with."""

    def __init__(self, *given: Any) -> None:
        if len(given) == 4:  # a builder
            self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = given


class OnDevice(TorchDispatchMode):
    """Counts operators that run on the device: all but views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        on_device = any(isinstance(each, torch.Tensor) and each.device == DEVICE for each in (made, *args))
        self.count += on_device and not func.is_view and "empty" not in func.name()
        return made


@contextmanager
def without_a_gpu() -> Iterator[StandIn]:
    """vLLM's modules are stand-ins, and so is CUDA's driver."""
    from attn_backends.adapters.vllm import plugin

    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend")
    modules = {name: ModuleType(name) for name in names}
    theirs: Any = modules["vllm.v1.attention.backend"]
    theirs.AttentionCGSupport = enum.Enum("AttentionCGSupport", ENUMERATED)
    theirs.AttentionMetadataBuilder = theirs.AttentionImpl = Base
    theirs.AttentionType = SimpleNamespace(DECODER="decoder")
    with ExitStack() as held:
        held.enter_context(patch.dict(sys.modules, modules))
        held.enter_context(patch.object(plugin, "vllm_version", lambda: (0, 32)))
        yield held.enter_context(kernels_without_a_gpu(keeps=False))


class Adapter:
    """The adapter as vLLM has it once a model is loaded."""

    def __init__(self, most_rows: int) -> None:
        from attn_backends.adapters.vllm.builder import ServedBuilder
        from attn_backends.adapters.vllm.layers import ServedImpl

        builder = type("Builder", (ServedBuilder,), {"ours": "TRITON", "_check": lambda *given: None})
        impl = type("Impl", (ServedImpl,), {"ours": "TRITON"})
        self.layers = [
            SimpleNamespace(impl=impl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS), dtype=torch.bfloat16,
                            layer_name=f"model.layers.{i}.self_attn.attn")
            for i in range(LAYERS)
        ]  # fmt: skip
        named = {layer.layer_name: layer for layer in self.layers}
        layout = SimpleNamespace(name="LBNHC")
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=named, cudagraph_mode=None),
            cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
            scheduler_config=SimpleNamespace(
                max_num_seqs=most_rows, max_num_batched_tokens=8192, async_scheduling=True
            ),
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
            speculative_config=None, additional_config={},
        )  # fmt: skip
        self.builder = builder(SimpleNamespace(block_size=PAGE_SIZE), list(named), config, DEVICE)
        pages = torch.empty(LAYERS, 64, PAGE_SIZE, KV_HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)
        self.kv_caches = [*pages.transpose(2, 3)]  # of each layer vLLM's [blocks, heads, block_size, 2D]


class Inputs:
    """vLLM's persistent tensors, and batches of them."""

    def __init__(self, most_rows: int) -> None:
        self.starts = torch.empty(most_rows + 1, dtype=torch.int32, device=DEVICE)
        self.starts_cpu = torch.zeros(most_rows + 1, dtype=torch.int32)
        self.lens = torch.empty(most_rows, dtype=torch.int32, device=DEVICE)
        self.lens_cpu = torch.zeros(most_rows, dtype=torch.int32)
        self.table = torch.empty(most_rows, MAX_LEN // PAGE_SIZE, dtype=torch.int32, device=DEVICE)
        self.slots = torch.empty(8192, dtype=torch.int64, device=DEVICE)

    def batch(self, query_lens: list[int], rows: int) -> SimpleNamespace:
        """So many rows, of which those behind the ones that have tokens are padding; where none is, so are tokens."""
        padded = query_lens + [0] * (rows - len(query_lens))
        tokens = sum(query_lens) + rows - len(query_lens)
        self.starts_cpu[: rows + 1] = torch.tensor([0, *padded]).cumsum(0)
        self.lens_cpu[:rows] = torch.tensor([CONTEXT + count if count == 1 else count for count in padded])
        return SimpleNamespace(
            query_start_loc=self.starts[: rows + 1], query_start_loc_cpu=self.starts_cpu[: rows + 1],
            seq_lens=self.lens[:rows], seq_lens_cpu_upper_bound=self.lens_cpu[:rows], num_reqs=rows,
            num_actual_tokens=tokens, max_query_len=max(query_lens), max_seq_len=int(self.lens_cpu[:rows].max()),
            block_table_tensor=self.table[:rows], slot_mapping=self.slots[:tokens], causal=True,
            mm_req_doc_ranges=None, rswa_prefix_lens=None,
        )  # fmt: skip


class Case(NamedTuple):
    name: str
    query_lens: list[int]
    rows: int
    in_graph: bool  # vLLM replays one: no forward runs


def cases(requests: int) -> list[Case]:
    most = max(1, requests - 1)
    return [
        Case("decode, graph", [1] * requests, requests, True),
        Case("decode, padded graph", [1] * most, requests, True),
        Case("decode, eager", [1] * requests, requests, False),
        Case("mixed, eager", [1] * most + [256], most + 1, False),
        Case("prompt, eager", [1024] * min(requests, 8), min(requests, 8), False),
    ]


def timed(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Median and ninth decile of a call, in us."""
    taken = []
    for _ in range(WARMUP + count):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken[WARMUP:]), statistics.quantiles(taken[WARMUP:], n=10)[-1]


def launches(stand_in: StandIn, call: Callable[[], object]) -> int:
    """What one call starts on the device."""
    before = stand_in.count
    with OnDevice() as counted:
        call()
    return counted.count + stand_in.count - before


@torch.inference_mode()
def measure(case: Case, count: int, stand_in: StandIn) -> dict[str, Any]:
    adapter, inputs = Adapter(256), Inputs(256)
    if case.in_graph:
        adapter.builder.build_for_cudagraph_capture(inputs.batch([1] * case.rows, case.rows))
    batch = inputs.batch(case.query_lens, case.rows)
    build = lambda: adapter.builder.build(0, batch)  # noqa: E731
    row: dict[str, Any] = {"batch": case.name, "requests": case.rows}
    row["build us"], row["build p90 us"] = timed(build, count)
    row["build launches"] = launches(stand_in, build)
    if case.in_graph:
        return row | {"first us": "", "forward us": "", "forward launches": "", "step us": row["build us"]}
    tokens = batch.num_actual_tokens
    query, output = (torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.empty(tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))

    def forward(index: int, metadata: Any) -> object:
        layer = adapter.layers[index]
        return layer.impl.forward(layer, query, key, value, adapter.kv_caches[index], metadata, output)

    steps = iter([build() for _ in range(WARMUP + count // 10)])
    row["first us"], _ = timed(lambda: forward(0, next(steps)), count // 10)
    metadata, layers = build(), itertools.cycle(range(LAYERS))
    row["forward us"], _ = timed(lambda: forward(next(layers), metadata), count)
    row["forward launches"] = launches(stand_in, lambda: forward(1, metadata))
    return row | {"step us": row["build us"] + row["first us"] + (LAYERS - 1) * row["forward us"]}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args(given)
    with without_a_gpu() as stand_in:
        rows = [measure(case, arguments.calls, stand_in) for requests in arguments.requests for case in cases(requests)]
    title = f"host time of the vLLM adapter over TRITON, SmolLM2's shape, {LAYERS} layers, no GPU"
    report("vllm_adapter", title, rows, ("torch", "triton", "numpy"))


if __name__ == "__main__":
    main()
