"""What would make the first requests wait, done while the engine loads: kernels compiled, and steps run of every size.

Compiling is the backend's own affair (`AttentionState.warm_up`). Steps of requests that nobody made then show the
libraries all that they load, choose or allocate at first use: products of so many tokens, memory, sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from attn_backends.engine.config import SamplingParams
from attn_backends.engine.outputs import Report
from attn_backends.engine.products import ProductRecorder, sizes_up_to, unlike
from attn_backends.engine.request import Request
from attn_backends.engine.runner import ModelRunner
from attn_backends.engine.sampler import PendingTokens, Sampler
from attn_backends.engine.scheduled_batch import ScheduledBatch
from attn_backends.interface import AttentionState
from attn_backends.spec import Limits

NAME = "warm up"  # of such requests, and a number
SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=50))  # in turns
PENDING_LAUNCHES = 3  # one is waited for, one runs, and one begins

Row = tuple[int, int]  # tokens in the cache, and new ones


def compile_kernels(state: AttentionState[Any], report: Report) -> None:
    """Compile what steps within the limits launch, side by side."""
    state.warm_up(lambda done, total, name: report(f"compiling kernels: {name}", done, total))


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
