"""What would make the first requests wait, done while the engine loads: kernels compiled, and steps run of every size.

Compiling is the backend's own affair (`AttentionState.warm_up`). Steps of requests that nobody made then show the
libraries all that they load, choose or allocate at first use: products of so many tokens, memory, sampling. cuBLAS
chooses a kernel when it first sees sizes that are far from all before them, which takes it longer than most products:
one step's products alone, run again at the sizes of other steps, show it those (`python -m benchmarks engine warm_up`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from attn_backends.engine.config import EngineConfig, SamplingParams
from attn_backends.engine.outputs import Report
from attn_backends.engine.request import Request, ScheduledBatch
from attn_backends.engine.runner import ModelRunner
from attn_backends.engine.sampler import PendingTokens, Sampler
from attn_backends.graphs.recorder import GraphRecorder
from attn_backends.spec import Limits

NAME = "warm up"  # of such requests, and a number
SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=50))  # in turns
PENDING_LAUNCHES = 3  # one is waited for, one runs, and one begins

Row = tuple[int, int]  # tokens in the cache, and new ones
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul")  # aten's names


def make_ready(
    runner: ModelRunner, sampler: Sampler, config: EngineConfig, limits: Limits, num_pages: int,
    report: Report, recorder: GraphRecorder | None,
) -> None:  # fmt: skip
    """Compile kernels, capture graphs and run steps, as far as the config asks for it."""
    if config.warm_up:
        runner.state.warm_up(lambda done, total, name: report(f"compiling kernels: {name}", done, total))
    runner.capture_graphs(config.graphs, report, recorder)
    if config.warm_up and runner.device.type != "cpu":
        run_steps(runner, sampler, limits, num_pages, config.scheduler.decode_steps_per_launch, report)
        run_products(runner, sampler, limits, num_pages, report)


def run_steps(
    runner: ModelRunner, sampler: Sampler, limits: Limits, num_pages: int, num_steps: int, report: Report
) -> None:
    """Run steps within the scheduler's limits over the first pages of an empty pool, the largest step first.

    What they write there belongs to nobody. What they sample is copied to the host like that of requests, of one step
    and of `num_steps` at a time: pinned memory takes milliseconds to allocate, and is kept for the next copy.
    """
    longest = min(limits.max_model_len, num_pages * runner.table.cache.page_size)
    steps = [*rows_of_steps(limits, longest)]
    for done, rows in enumerate(steps):
        report("running steps to warm up", done, len(steps))
        tokens, largest = _run_step(runner, sampler, rows)
        for count in (1, num_steps):  # some are on their way at a time
            _ = [PendingTokens((tokens,) * count, (largest,) * count) for _ in range(PENDING_LAUNCHES)]
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


@torch.inference_mode()
def run_products(runner: ModelRunner, sampler: Sampler, limits: Limits, num_pages: int, report: Report) -> None:
    """Run the matrix products of a step within the limits at all sizes at which their library may choose a kernel."""
    longest = min(limits.max_model_len, num_pages * runner.table.cache.page_size)
    weights = {size for weight in runner.layers.model.module.parameters() for size in weight.shape}
    num_rows = unlike(min(limits.max_num_requests, limits.max_num_tokens), weights) or 1
    num_tokens = unlike(min(limits.max_num_tokens, num_rows * longest), weights | {num_rows})
    if num_tokens < num_rows:
        return  # steps of so few tokens have all been run
    lens = np.diff(np.arange(num_rows + 1) * num_tokens // num_rows).tolist()
    sizes = {num_tokens: limits.max_num_tokens} | ({num_rows: limits.max_num_requests} if num_rows > 1 else {})
    with ProductRecorder(sizes) as recorder:
        _run_step(runner, sampler, [(0, count) for count in lens])
    for done, product in enumerate(recorder.products):
        report("running products to warm up", done, len(recorder.products))
        for size in sizes_up_to(product.most):
            product.run(size)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def _run_step(runner: ModelRunner, sampler: Sampler, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows sample, as `Sampler.choose` returns it."""
    requests = [_request(i, row, runner.table.cache.page_size) for i, row in enumerate(rows)]
    counts = [num_new for _, num_new in rows]
    batch = runner.arrange(ScheduledBatch.from_rows([*zip(requests, counts, strict=True)]))
    chosen = sampler.choose(runner.run(batch), batch.sampled)
    for request in requests:
        runner.forget(request)
    return chosen


def rows_of_steps(limits: Limits, longest: int) -> Iterator[list[Row]]:
    """Rows of each step: for every power of two of tokens up to the most, prompts, chunks beside decodes, and decodes.

    Args:
        longest: tokens that a row can have.
    """
    size = limits.max_num_tokens
    while size:
        prompts = min(-(-size // longest), limits.max_num_requests)
        yield [(0, min(longest, size - i * longest)) for i in range(prompts)]
        decodes = min(size, limits.max_num_requests)
        if longest > 1:
            yield [(1, 1)] * decodes
        if longest > 1 and size > 1 and limits.max_num_requests > 1:
            beside = min(size // 2, limits.max_num_requests - 1)
            yield [*[(1, 1)] * beside, (1, min(longest - 1, size - beside))]
        size //= 2


def _request(number: int, row: Row, page_size: int) -> Request:
    """A request with the first pages, which all of them share."""
    num_cached, num_new = row
    request = Request(f"{NAME} {number}", [0] * (num_cached + num_new), SAMPLING[number % len(SAMPLING)])
    request.num_computed_tokens = num_cached
    request.add_pages(np.arange(-(-(num_cached + num_new) // page_size), dtype=np.int32))
    return request


class Sized(NamedTuple):
    """A tensor of a product that is as long as the step is: made anew for each size."""

    shape: tuple[int, ...]
    axis: int  # the one that varies
    order: tuple[int, ...]  # axes from the largest stride to the smallest
    dtype: torch.dtype
    device: torch.device

    def empty(self, size: int) -> torch.Tensor:
        shape = [*self.shape]
        shape[self.axis] = size
        made = torch.empty([shape[axis] for axis in self.order], dtype=self.dtype, device=self.device)
        return made.permute([self.order.index(axis) for axis in range(len(shape))])


class Product(NamedTuple):
    """One call of the library."""

    operator: Any
    arguments: tuple[Any, ...]  # a `Sized` for each tensor that varies
    named: Mapping[str, Any]
    most: int  # the size of a step that it is run for, at most

    def run(self, size: int) -> None:
        arguments, named = tree_map(
            lambda given: given.empty(size) if isinstance(given, Sized) else given,
            (self.arguments, self.named), is_leaf=lambda given: isinstance(given, Sized),
        )  # fmt: skip
        self.operator(*arguments, **named)


class ProductRecorder(TorchDispatchMode):
    """Keeps a call of each product that runs while it is entered, and that has an axis of one of the sizes.

    Args:
        sizes: a size that no weight has, and the most of what it stands for: tokens, say, or sampled rows.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes
        self._found: dict[object, Product] = {}

    @property
    def products(self) -> list[Product]:
        return [*self._found.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self._keep(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if isinstance(result, list):  # a library's operator may return tensors that are not defined: no mode takes them
            return [torch.empty(0, dtype=torch.uint8, device="cpu") if part is None else part for part in result]
        return result

    def _keep(self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [given for given in [*arguments, *named.values()] if isinstance(given, torch.Tensor)]
        found = next((size for size in self._sizes if any(size in tensor.shape for tensor in tensors)), None)
        if found is None:
            return
        varying = [tensor for tensor in tensors if found in tensor.shape]
        if len(varying) == len(tensors) or any(tensor.shape.count(found) > 1 for tensor in varying):
            return  # attention by hand: no operand is a weight, or logits have the size twice
        key = operator, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if key not in self._found:
            arguments, named = tree_map(lambda given: _sized(given, found), (arguments, named))
            self._found[key] = Product(operator, arguments, named, self._sizes[found])


def _sized(given: Any, size: int) -> Any:
    if not isinstance(given, torch.Tensor) or size not in given.shape:
        return given
    strides = given.stride()
    order = sorted(range(given.dim()), key=lambda axis: -strides[axis])
    return Sized(tuple(given.shape), given.shape.index(size), tuple(order), given.dtype, given.device)


def sizes_up_to(most: int) -> Iterator[int]:
    """Sizes that differ by tiles of few rows. From 4,096 on a step lasts so long that another kernel hardly shows."""
    for first, end, step in ((1, 8, 1), (8, 1024, 8), (1024, 4096, 16), (4096, most, 128)):
        yield from range(first, min(end, most), step)
    yield most


def unlike(most: int, taken: set[int]) -> int:
    """The largest size up to `most` that is none of those taken; 0 if there is none."""
    return next((size for size in range(most, 1, -1) if size not in taken), 0)
