"""Host time of a decode step's plan: our `build` and `begin_forward`, against the bare FlashInfer wrapper's `plan`.

    python -m benchmarks host plan_host_time [--backend FLASHINFER ...] [--no-bare]

Contenders take one step each in turns. The device is waited for between two steps, outside the time, so that no queue
fills. Ours gets its batch from a `StepTable`, by `step` or by `advance`, and plans eagerly or through the state's clone
for graphs, which reads the table's tensors where they are. "plan us" is `build` and `begin_forward`; "with table us" is
that and the table's step, which makes the inputs. The bare wrapper's inputs are ready, on the CPU or on the GPU; a
wrapper for graphs copies them into its buffers, unless it is planned by `fast_decode_plan`, which takes them as filled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_backends import AttentionSpec, get_backend, plan_groups, select_backend
from attn_backends.interface.capabilities import CudaGraphSupport
from attn_backends.registry import validate_options
from attn_backends.step.table import StepBatch
from benchmarks.attention import bare_kernels
from benchmarks.host.builder import PAGE_SIZE
from benchmarks.host.step_metadata import STEPS, Decoding
from benchmarks.lib.gpu_harness import free_memory, installed
from benchmarks.lib.harness import report
from benchmarks.lib.reasons import reason

SPEC = AttentionSpec(32, 8, 128, dtype=torch.bfloat16)
WARMUP = 20
PACKAGES = ("torch", "triton", "flashinfer-python", "numpy")


class Taken(NamedTuple):
    """Of one step, in microseconds."""

    plan_us: float
    with_table_us: float  # and what made the batch


Step = Callable[[], Taken]


class Work(Decoding):
    """Decoding requests; `step` gives batches for graphs if wanted."""

    def __init__(self, num_requests: int, num_tokens: int, device: str, for_graph: bool) -> None:
        super().__init__(num_requests, num_tokens, device)
        self.for_graph = for_graph

    def step(self) -> StepBatch:
        table, num_pages = self.table, self.table.num_pages[: len(self.pages)]
        full = np.flatnonzero(self.context_lens == num_pages * PAGE_SIZE)
        table.append(full, self.pages[full, num_pages[full]])
        batch = table.step(self.context_lens, self.query_lens, self.token_ids, for_graph=self.for_graph)
        self.context_lens += 1
        return batch


def ours(name: str, work: Work, options: dict[str, Any], advances: bool) -> Step:
    """One step of a backend, by the table's `step` or `advance`.

    Raises:
        Unsupported: the backend cannot serve it, or not in graphs.
    """
    table = work.table
    limits, cache, device = table.limits, table.cache, table.device
    backend = select_backend(name, [SPEC], cache, device).backend
    group = plan_groups({0: SPEC})[0]
    given = {"options": validate_options(name, options)}
    builder = backend.get_builder_cls()(group, cache, limits, device, **given)
    state = backend.get_state_cls()([group], cache, limits, device, **given)
    planner = state
    if work.for_graph:
        with state.graph_capture(limits.max_num_requests, table.side.buffers):
            planner = state.graph_clone(limits.max_num_requests)
    batch, held = work.step(), None

    def step() -> Taken:
        nonlocal batch, held  # the last step is let go within the time, as by an engine
        started = time.perf_counter()
        batch = work.advance(batch) if advances else work.step()
        made = time.perf_counter()
        held = planner.begin_forward(builder.build(0, batch.common))
        done = time.perf_counter()
        return Taken((done - made) * 1e6, (done - started) * 1e6)

    return step


def bare(work: Work, tensor_cores: bool, graph: bool, on_gpu: bool) -> Step:
    """`plan` of the bare wrapper. Its inputs never change: nothing in it depends on that."""
    device = work.table.device
    inputs = bare_kernels.flashinfer_inputs(work.step().common, SPEC)
    wrapper = bare_kernels.decode_wrapper(inputs, tensor_cores, graph, device)
    inputs = inputs.moved(device) if on_gpu else inputs

    def step() -> Taken:
        started = time.perf_counter()
        inputs.plan_decode(wrapper)
        us = (time.perf_counter() - started) * 1e6
        return Taken(us, us)

    return step


def bare_fast(work: Work, tensor_cores: bool) -> Step:
    """`fast_decode_plan` of a wrapper for graphs: it copies nothing, and is told the page counts on the CPU."""
    from flashinfer import fast_decode_plan

    device = work.table.device
    inputs = bare_kernels.flashinfer_inputs(work.step().common, SPEC)
    wrapper, on_gpu = bare_kernels.decode_wrapper(inputs, tensor_cores, True, device), inputs.moved(device)
    on_gpu.plan_decode(wrapper)
    arguments = (on_gpu.indptr, on_gpu.indices, on_gpu.last_page_len, *inputs.heads, inputs.page_size)
    keywords = inputs.keywords | {"global_override_indptr_cpu": inputs.indptr}

    def step() -> Taken:
        started = time.perf_counter()
        fast_decode_plan(wrapper, *arguments, **keywords)
        us = (time.perf_counter() - started) * 1e6
        return Taken(us, us)

    return step


def makers(num_requests: int, arguments: argparse.Namespace) -> dict[str, Callable[[], Step]]:
    """What makes each contender, by name; each has a table of its own."""

    def work(for_graph: bool) -> Work:
        return Work(num_requests, arguments.tokens, arguments.device, for_graph)

    found: dict[str, Callable[[], Step]] = {}
    for name in arguments.backend:
        has_graphs = get_backend(name).capabilities().cuda_graph > CudaGraphSupport.NEVER
        for for_graph in (False, True) if has_graphs else (False,):
            for advances in (False, True):
                label = f"{name}, {'graph' if for_graph else 'eager'}, {'advance' if advances else 'step'}"
                found[label] = lambda name=name, graph=for_graph, advances=advances: ours(
                    name, work(graph), arguments.options, advances
                )
    for cores in ("tensor-core", "CUDA-core") if arguments.bare else ():
        found[f"FlashInfer {cores}, fast_decode_plan"] = lambda cores=cores: bare_fast(
            work(False), cores == "tensor-core"
        )
        for graph in (False, True):
            for place in ("CPU", "GPU"):
                label = f"FlashInfer {cores}, {'graph' if graph else 'eager'}, {place} inputs"
                found[label] = lambda cores=cores, graph=graph, place=place: bare(
                    work(False), cores == "tensor-core", graph, place == "GPU"
                )
    return found


def in_turns(steps: dict[str, Step], count: int, wait: Callable[[], object]) -> dict[str, list[Taken]]:
    """`count` steps of each, after some to warm up."""
    taken: dict[str, list[Taken]] = {name: [] for name in steps}
    for _ in range(WARMUP + count):
        for name, step in steps.items():
            wait()
            taken[name].append(step())
    return {name: times[WARMUP:] for name, times in taken.items()}


@torch.inference_mode()
def measure(num_requests: int, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of one batch size, and who dropped out."""
    steps, dropped = {}, []
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    for name, make in makers(num_requests, arguments).items():
        try:
            steps[name] = make()
            steps[name]()  # compiles what it needs
            wait()
        except Exception as error:  # whatever a kernel library raises
            steps.pop(name, None)
            dropped.append(f"{num_requests} requests: {name}: {reason(error)}")
    rows = []
    for name, times in in_turns(steps, arguments.steps, wait).items():
        plan, whole = ([taken[i] for taken in times] for i in (0, 1))
        figures = {
            "plan us": statistics.median(plan),
            "p90 us": statistics.quantiles(plan, n=10)[-1],
            "with table us": statistics.median(whole),
            "mean with table us": statistics.mean(whole),
        }
        rows.append({"requests": num_requests, "contender": name, **figures})
    return rows, dropped


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="*", type=str.upper, default=["FLASHINFER"])
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=4096, help="of a request, about")
    parser.add_argument("--steps", type=int, default=300, help=f"at most {STEPS - WARMUP - 2 * PAGE_SIZE}")
    parser.add_argument("--options", type=json.loads, default={}, help="backend_options, as JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    arguments = parser.parse_args(given)
    rows, dropped = [], []
    for num_requests in arguments.requests:
        measured, out = measure(num_requests, arguments)
        for line in out:
            print(f"dropped out: {line}", flush=True)
        rows, dropped = rows + measured, dropped + out
        free_memory(torch.device(arguments.device))
    name = "_".join(["plan_host_time", *map(str.lower, arguments.backend)])
    report(name, f"host time of a decode step's plan, {arguments.tokens} tokens a request", rows, installed(*PACKAGES))
    if any(f": {backend}" in line for backend in arguments.backend for line in dropped):
        raise SystemExit("a backend of ours dropped out")


if __name__ == "__main__":
    main()
