"""Scales of cached keys and values, worked out by one pass of the model over a text while the engine loads."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.engine.models.context import Steps
from attn_backends.engine.models.kv_scales import KVScales
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.engine.outputs import Report
from attn_backends.interface import Plans
from attn_backends.spec import MLASpec

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


class _Largest:
    """A context in which every layer attends this step's own keys, and leaves how large they and its values are."""

    def __init__(self, plans: Plans[int], steps: Steps) -> None:
        self.plans = plans
        self.steps = steps
        self.found: dict[int, torch.Tensor] = {}  # [2] f32: of keys, of values

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]  # the dry run has checked it
        self.found[layer] = torch.stack([part.abs().amax().float() for part in (key, value)])
        return self.plans.forward(layer, query, key, value, None, self.steps)


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
    tokens = torch.tensor(token_ids, device=plans.device)
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
