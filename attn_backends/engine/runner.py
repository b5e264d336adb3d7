"""Runs scheduled batches: page table and metadata brought up to date, one pass through the model, eager or captured.
Scales of cached keys and values may be worked out by one such pass over a text while the engine loads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import allocate_kv_cache
from attn_backends.engine.config import GraphsConfig
from attn_backends.engine.graphs import FullGraphs, GraphKey, PiecewiseGraphs, SizeLadder, default_sizes, graph_mode
from attn_backends.engine.layers import Layers
from attn_backends.engine.models.context import NewTokens, Steps
from attn_backends.engine.models.kv_scales import KVScales
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.engine.outputs import Report, silent
from attn_backends.engine.request import Request, ScheduledBatch
from attn_backends.graphs.recorder import CudaRecorder, GraphRecorder
from attn_backends.interface import AttentionBackend, Plans
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, MLASpec
from attn_backends.step.table import StepBatch, StepTable

logger = logging.getLogger(__name__)
HEADROOM = 2.0  # times the largest number of the pass still fits: other texts have larger ones
TEXT = """Water boils at 100 degrees Celsius at sea level, and at 71 on top of Mount Everest; why is that so?
In 1969 two people walked on the Moon. "We came in peace for all mankind," says the plaque that they left there.
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # 0, 1, 1, 2, 3, 5, 8, 13, 21, 34
Die Katze schläft auf dem Sofa. Le train part à huit heures et demie. El cielo está despejado esta noche. 你好，世界。
| name | price | | tea | 3.20 | | coffee | 4.75 | Total: 7.95, of which 19 % is tax.
Dear Ms. Okafor, thank you for your letter of March 3rd. Unfortunately the part (no. B-7741/x) is out of stock.
{"id": 17, "tags": ["red", "blue"], "nested": {"ok": true, "ratio": -0.125e-3}} SELECT * FROM users WHERE age >= 18;
The proof is by induction: if a^2 + b^2 = c^2 holds for n, then it holds for n + 1 as well. QED. Ha! She laughed.
"""


def _bind(plans: Plans[int], model: LoadedModel, scales: Mapping[int, KVScales]) -> None:
    for layer in plans.specs:
        plans.bind(layer, **scales.get(layer, KVScales())._asdict(), **model.layers[layer].weights)


class ModelRunner:
    """A model, its KV pool, its page table, and one backend's builders, state and impls.

    Args:
        specs: the layers as the backend was selected for them (cache dtype included).
        scales: scales of the layers' cached keys and values; 1 for a layer that is not in it. None: worked out here.
        options: the backend's validated options, or None.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: type[AttentionBackend],
        specs: Mapping[int, AttentionSpec],
        cache: KVCacheSpec,
        limits: Limits,
        device: torch.device,
        *,
        scales: Mapping[int, KVScales] | None = {},
        options: object = None,
        report: Report = silent,
    ) -> None:
        # One row more than requests: padding that makes up a number of tokens is one row.
        num_tokens = max(limits.max_num_tokens, model.min_tokens)
        self.limits = Limits(limits.max_num_requests + 1, num_tokens, limits.max_model_len)
        self.device = device
        try:
            self.pool = allocate_kv_cache(backend, specs, cache, device)
        except RuntimeError as error:  # torch's word for it
            raise ValueError(
                f"the pool of {cache.pages} pages cannot be allocated on {device} ({str(error).splitlines()[0]}): "
                "lower cache.memory or cache.num_pages"
            ) from error
        self.table = StepTable(self.limits, cache, device)
        plans = Plans(backend, specs, cache, self.limits, device, options)
        _bind(plans, model, scales or {})
        if scales is None:
            _bind(plans, model, calibrated_scales(model, plans, report))
        self.state = plans.state
        self.layers = Layers(model, plans, self.pool.layers)
        self.num_replays = 0
        self._num_pages: dict[str, int] = {}  # of requests in the table
        self.graphs: FullGraphs | PiecewiseGraphs | None = None
        self._cascade = backend.capabilities().cascade
        self._page_size = cache.page_size

    def capture_graphs(
        self,
        config: GraphsConfig,
        report: Report = silent,
        recorder: GraphRecorder | None = None,
    ) -> None:
        """Capture every size that the config asks for; nothing if it asks for none.

        Args:
            recorder: what captures; None: CUDA graphs, on a GPU alone.

        Raises:
            ValueError: graphs are asked for and the device has none, or a size is above the limits.
            Unsupported: the backend cannot run in the graphs that are asked for.
        """
        mode = graph_mode(config, self.layers.plans.backend, self.device, recorder is not None)
        if mode == "none":
            return
        sizes = config.sizes or default_sizes(min(self.limits.max_num_requests - 1, self.limits.max_num_tokens))
        parts = (self.layers, self.state, self.table, recorder or CudaRecorder(), SizeLadder(sizes))
        query_lens = frozenset(config.query_lens)
        graphs = FullGraphs(*parts, query_lens=query_lens) if mode == "full" else PiecewiseGraphs(*parts)
        try:
            with torch.inference_mode():
                graphs.capture(report)
        except RuntimeError as error:
            if config.mode != "auto":
                raise
            logger.warning("steps run eager: graphs.mode is auto, and this model cannot be captured: %s", error)
        else:
            self.graphs = graphs

    def forget(self, request: Request) -> None:
        """Give up a request's row: its pages are no longer its own."""
        if self._num_pages.pop(request.request_id, None) is not None:
            self.table.leave(request.request_id)

    def forget_all(self) -> None:
        """Give up all rows, also those that an interrupted edit left half there."""
        self._num_pages.clear()
        self.table.clear()

    def arrange(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Bring the page table up to date with a batch's requests; returns the batch in the order of its rows."""
        names = [request.request_id for request in batch.requests]
        for name, request in zip(names, batch.requests, strict=True):
            known = self._num_pages.get(name)
            if known == request.num_pages:
                continue
            if known is None:
                self.table.enter(name, request.page_ids)
            else:
                self.table.extend(name, request.page_ids[known:])
            self._num_pages[name] = request.num_pages
        order = self.table.arrange(names, batch.query_lens)
        return batch if (order[:-1] < order[1:]).all() else batch.in_order(order)

    def grow(self, batch: ScheduledBatch) -> None:
        """`arrange` for a batch that follows: rows are where they were, and some have new pages."""
        if not len(batch.grown_rows):
            return
        requests = [batch.requests[row] for row in batch.grown_rows.tolist()]
        added = [request.page_ids[self._num_pages[request.request_id] :] for request in requests]
        if all(len(pages) == 1 for pages in added):
            self.table.append(batch.grown_rows, np.concatenate(added))
        else:
            for request, pages in zip(requests, added, strict=True):
                self.table.extend(request.request_id, pages)
        self._num_pages.update((request.request_id, request.num_pages) for request in requests)

    @property
    def can_follow(self) -> bool:
        """Whether `run_next` would run the last step's graph, or at its padded size: padding is rows of one token."""
        return self._step.common.num_tokens == self._step.common.num_reqs

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        """Logits [len(batch.sample_rows), vocab] of the rows whose last token is their last known one.

        The batch is in the order of the table's rows (see `arrange`). The result is good until the next run.
        """
        self._logits_at = (np.cumsum(batch.query_lens, dtype=np.int64) - 1)[batch.sample_rows]
        missing = max(0, self.layers.model.min_tokens - len(self._logits_at))
        at = np.concatenate([self._logits_at, np.zeros(missing, np.int64)]) if missing else self._logits_at
        self._logits_at_on_device = torch.from_numpy(at).to(self.device, non_blocking=True)
        self._prefix_len = self._common_prefix_len(batch)
        self._step, self._key = self._begin(batch)
        return self._launch()

    @torch.inference_mode()
    def run_next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next step of a batch that decodes, given each row's token [num_rows] i64 on the device."""
        self._step = self.table.advance(self._step, tokens)
        return self._launch()

    def _begin(self, batch: ScheduledBatch) -> tuple[StepBatch, GraphKey | None]:
        """The step's tensors, padded to a captured size or to what the model needs."""
        graphs = self.graphs
        key = graphs.fit(batch.query_lens) if graphs else None
        missing = max(0, self.layers.model.min_tokens - len(batch.token_ids))
        padding = graphs.padding(key, batch.query_lens) if graphs and key else (int(missing > 0), missing)
        step = self.table.step(
            batch.context_lens, batch.query_lens, batch.token_ids, num_padded_reqs=padding[0],
            padded_query_len=padding[1], for_graph=bool(graphs and key and graphs.for_graph),
        )  # fmt: skip
        return step, key

    def _launch(self) -> torch.Tensor:
        common, key = self._step.common, self._key
        if self.graphs and key and key.num_tokens == common.num_tokens and self.graphs.serves(common):
            self.num_replays += 1
            return self.graphs.run(key, self._step, self._logits_at)
        eager = replace(common, for_graph=False) if common.for_graph else common
        steps = self.layers.plan(self.state, eager, self._prefix_len)
        context, logits_at = self.layers.context(steps), self._logits_at_on_device
        logits = self.layers.model.forward(self._step.token_ids, self._step.positions, logits_at, context)
        return logits[: len(self._logits_at)]

    def _common_prefix_len(self, batch: ScheduledBatch) -> int:
        """Leading keys that all requests share in the same pages, for a backend that reads them once."""
        if not self._cascade or len(batch.requests) < 2:
            return 0
        pages = self.table.page_table[: len(batch.requests), : int(batch.context_lens.min()) // self._page_size]
        if not pages.shape[1] or (pages[:, 0] != pages[0, 0]).any():
            return 0  # most batches end here, whatever their contexts
        differs = (pages != pages[0]).any(axis=0)
        return (int(differs.argmax()) if differs.any() else len(differs)) * self._page_size


class _Largest:
    """A context in which every layer attends this step's own keys, and leaves how large they and its values are."""

    def __init__(self, plans: Plans[int], steps: Steps) -> None:
        self.plans = plans
        self.steps = steps
        self.found: dict[int, torch.Tensor] = {}  # [2] f32: of keys, of values

    def attend(self, module: Any, new: NewTokens, constants: Mapping[str, Any]) -> torch.Tensor:
        layer: int = module.layer_idx  # the dry run has checked it
        self.found[layer] = torch.stack([part.abs().amax().float() for part in new[1:]])
        return self.plans.forward(layer, *new, None, self.steps)


@torch.inference_mode()
def calibrated_scales(model: LoadedModel, plans: Plans[int], report: Report) -> dict[int, KVScales]:
    """Scales with which `HEADROOM` times the largest key and value of a pass over `TEXT` is the cache's largest number.

    The pass reads and writes no cache: it sees keys as the model makes them.

    Args:
        plans: with all layers bound.

    Raises:
        ValueError: a layer's keys or values are not finite.
    """
    report("working out KV scales")
    token_ids = model.tokenizer(TEXT).input_ids[: min(plans.limits.max_num_tokens, plans.limits.max_model_len)]
    row = SequenceGroup("calibration", (SequenceData(0, len(token_ids), None),))
    common = CommonAttentionMetadata.from_sequence_groups([row], plans.cache.page_size, plans.device)
    context = _Largest(plans, plans.plan(common, state=plans.state))
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=plans.device)
    model.forward(
        tokens, torch.arange(len(token_ids), device=plans.device), common.query_start_loc[1:].long() - 1, context
    )
    scales = {layer: _scales_of(layer, largest.tolist(), plans) for layer, largest in context.found.items()}
    keys, values = zip(*scales.values(), strict=True)
    logger.info(
        "KV scales by a pass over %d tokens: %.3g to %.3g for keys, %.3g to %.3g for values, of %d layers",
        len(token_ids), min(keys), max(keys), min(values), max(values), len(scales),
    )  # fmt: skip
    return scales


def _scales_of(layer: int, largest: list[float], plans: Plans[int]) -> KVScales:
    spec = plans.specs[layer]
    if not all(map(math.isfinite, largest)):
        raise ValueError(
            f"layer {layer} has keys up to {largest[0]} and values up to {largest[1]} in the pass for KV scales: leave "
            "cache.calculate_kv_scales out, and set cache.k_scale and cache.v_scale"
        )
    if isinstance(spec, MLASpec):  # a latent row has one scale
        largest = [max(largest), 0.0]
    return KVScales(*(HEADROOM * number / torch.finfo(spec.cache_dtype).max or 1.0 for number in largest))
