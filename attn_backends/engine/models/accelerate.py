"""`accelerate`: stages that make a Hugging Face model's steps fast. Each changes results by rounding alone.

fuse: decoder layers of the Llama form with few operations (`fused`). merge: q, k and v, and gate and up, as one product
each. pack: on a CPU, weights reordered once for its matmul library.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Literal, get_args

from attn_backends.engine.models.fused.cpu import fuse_layers
from attn_backends.engine.models.fused.linears import merge_projections, min_tokens, pack_linears
from attn_backends.machine import HAS_TRITON

Stage = Literal["fuse", "merge", "pack"]
STAGES: tuple[Stage, ...] = get_args(Stage)


def accelerate(model: Any, stages: Collection[Stage] = STAGES) -> int:
    """Replace layers of a model that was checked as it is; returns to how many tokens shorter steps are padded.

    Args:
        stages: those to run, for measuring each by itself.
    """
    num_packed = _fuse(model) if "fuse" in stages else 0
    if "merge" in stages:
        merge_projections(model)
    if "pack" in stages:
        num_packed += pack_linears(model)
    return min_tokens(model.dtype) if num_packed else 1


def _fuse(model: Any) -> int:
    """Returns how many layers have oneDNN's or MKL's products now."""
    base = model.base_model
    if not hasattr(base, "rotary_emb"):
        return 0
    if model.device.type == "cuda" and HAS_TRITON:
        from attn_backends.engine.models.fused.cuda import fuse_cuda_layers

        fuse_cuda_layers(model)
        return 0
    return fuse_layers(base.layers, base.rotary_emb)


def twin(model: Any) -> Any:
    """Another model over the same weights, which keeps its form when this one's layers are replaced."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
