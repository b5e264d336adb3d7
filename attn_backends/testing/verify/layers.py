"""Layers by chance: head shapes of published models, whole or a share of one of several GPUs, and declared features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from attn_backends.interface.capabilities import Capabilities
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, KVCacheSpec, Layout, MLASpec, alibi_slopes
from attn_backends.testing.cases.models import PublishedModel, published_models
from attn_backends.testing.harness import Backend
from attn_backends.testing.verify.sizes import Size, fits

_FEATURES = ("window", "soft_cap", "alibi", "sinks", "chunks", "non_causal", "scale", "rope")
_PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
_DIMS = (64, 80, 96, 128, 192, 256)
_SPLITS = (2, 4, 8, 16)  # GPUs that a model's heads are split over


@dataclass(frozen=True)
class Form:
    """What stays the same for all batches of a case: layers over one pool and one state."""

    models: tuple[str, ...]  # whose heads the layers have
    specs: tuple[AttentionSpec, ...]  # no two alike
    scales: tuple[tuple[float, float], ...]  # k_scale and v_scale of each layer
    page_size: int
    layout: Layout
    interleaved: bool  # keys and values of a page lie in one tensor
    refused: Counter[str]  # what was drawn and refused, by codes


def draw_form(backend: Backend, numbers: Random, size: Size, device: str) -> Form:
    """Layers that the backend serves; what it refuses of a draw is counted and left out."""
    can, refused = backend.capabilities(), Counter[str]()
    page_size, layout = _page_size(can, numbers), numbers.choice(sorted(can.layouts))
    cache = KVCacheSpec(1, page_size, layout)
    dtype, cache_dtype = _dtypes(can, numbers)
    models = [model for model in published_models() if model.is_mla == can.mla]
    fitting = [model for model in models if _declares(can, model)]
    model = numbers.choice(fitting or models)
    heads = _heads(model, can, numbers, size)
    others = sorted(can.attention_types - {AttentionType.DECODER})
    kind = numbers.choice(others) if others and numbers.random() < 0.06 else AttentionType.DECODER
    specs: dict[AttentionSpec, str] = {}
    for _ in range(1 if kind is not AttentionType.DECODER else numbers.choice((1, 1, 2, size.max_layers))):
        plain = {**heads, "dtype": dtype, "cache_dtype": cache_dtype}
        asked = _features(can, numbers, kind)
        spec = _served(backend, plain, model, kind, asked, cache, device, numbers, refused)
        specs[spec] = model.name
    exact = numbers.random() < 0.5
    scales = tuple(_scales(spec, numbers, exact) for spec in specs)
    if can.mla:
        scales = tuple((k_scale, 1.0) for k_scale, _ in scales)  # a latent row has one
    joined = not can.mla and all(spec.head_dim == spec.head_dim_vo for spec in specs) and numbers.random() < 0.25
    return Form(tuple(specs.values()), tuple(specs), scales, page_size, layout, joined, refused)


def _served(
    backend: Backend, plain: dict[str, Any], model: PublishedModel, kind: AttentionType, asked: Sequence[str],
    cache: KVCacheSpec, device: str, numbers: Random, refused: Counter[str],
) -> AttentionSpec:  # fmt: skip
    """The layer with the features that were asked, or with fewer until the backend serves it.

    Raises:
        ValueError: it does not serve even the plain one.
    """
    can, features = backend.capabilities(), list(asked)
    changes = {name: _feature(name, plain["num_qo_heads"], plain["head_dim"], model, numbers) for name in _FEATURES}
    while True:
        given = dict(plain)
        for name in features:
            given |= changes[name]
        if kind is not AttentionType.DECODER:
            given |= {"attention_type": kind, "causal": False}
        spec = MLASpec(**given) if can.mla else AttentionSpec(**given)
        rejections = backend.reject(spec, cache, device)
        if not rejections:
            return spec
        refused["+".join(sorted({rejection.code for rejection in rejections}))] += 1
        if features:
            features.pop()
        elif plain["cache_dtype"] is not plain["dtype"]:
            plain = plain | {"cache_dtype": plain["dtype"]}
        elif (smaller := _smaller(plain, can)) is not None:
            plain = smaller
        else:
            raise ValueError(f"{backend.get_name()} refuses a plain layer that it declares: {rejections[0]}")


def _smaller(plain: dict[str, Any], can: Capabilities) -> dict[str, Any] | None:
    """A layer of the commonest dims and dtype that are declared, if the given one is another."""
    dims = sorted(can.head_dims or {64}, key=lambda dim: (dim not in (64, 128), dim))
    common = {"head_dim": dims[0], "head_dim_vo": dims[0]} if not can.mla else {}
    floats = [dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if dtype in can.dtypes]
    changed = {**plain, **common, "dtype": floats[0], "cache_dtype": floats[0]}
    return changed if changed != plain else None


def _declares(can: Capabilities, model: PublishedModel) -> bool:
    asked = [
        (model.head_dim, can.head_dims),
        (model.kv_lora_rank, can.kv_lora_ranks),
        (model.qk_rope_head_dim, can.qk_rope_head_dims),
        (model.head_dim_vo or model.head_dim, can.head_dims),
    ]
    return all(got is None or some is None or got in some for got, some in asked)  # fmt: skip


def _heads(model: PublishedModel, can: Capabilities, numbers: Random, size: Size) -> dict[str, Any]:
    """The model's heads, or those of one GPU of several; sometimes of another declared width."""
    qo, kv = model.num_qo_heads, model.num_kv_heads
    ways = [1, *(n for n in _SPLITS if qo % n == 0 and (kv % n == 0 or n % kv == 0))]
    if can.head_counts is not None:
        ways = [n for n in ways if qo // n in can.head_counts] or ways
    split = numbers.choice(ways) if numbers.random() < 0.5 else ways[0]
    if size.name == "small":  # interpreted, a head costs as much as a request
        split = next((n for n in ways if n >= split and max(1, kv // n) <= 8), ways[-1])
    qo, kv = qo // split, max(1, kv // split)
    if can.head_counts is not None and qo not in can.head_counts:
        qo = numbers.choice(sorted(can.head_counts))
    dim, dim_vo = model.head_dim, model.head_dim_vo or model.head_dim
    if can.mla:
        lora, rope = model.kv_lora_rank, model.qk_rope_head_dim
        ranks, ropes = can.kv_lora_ranks, can.qk_rope_head_dims
        lora = lora if ranks is None or lora in ranks else numbers.choice(sorted(ranks))
        rope = rope if ropes is None or rope in ropes else numbers.choice(sorted(ropes))
        nope = model.head_dim - (model.qk_rope_head_dim or 0)
        return {"num_qo_heads": qo, "head_dim": nope + (rope or 0), "head_dim_vo": dim_vo, "kv_lora_rank": lora,
                "qk_rope_head_dim": rope}  # fmt: skip
    dims = sorted(can.head_dims or _DIMS)
    if dim not in dims or numbers.random() < 0.1:
        dim = numbers.choice(dims)
        dim_vo = dim
    if can.unequal_head_dims and numbers.random() < 0.1:
        dim_vo = numbers.choice(dims)
    return {"num_qo_heads": qo, "num_kv_heads": kv, "head_dim": dim, "head_dim_vo": dim_vo}


def _dtypes(can: Capabilities, numbers: Random) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of queries, mostly 16 bits, and of the cache, which is the same in half of the draws."""
    declared = sorted(can.dtypes, key=str)
    halves = [dtype for dtype in declared if dtype.itemsize == 2]
    dtype = numbers.choice(halves if halves and numbers.random() < 0.75 else declared)
    if numbers.random() < 0.5 and dtype in can.cache_dtypes:
        return dtype, dtype
    eight = [d for d in sorted(can.cache_dtypes, key=str) if d in FP8_DTYPES]
    others = [d for d in sorted(can.cache_dtypes, key=str) if d in declared or d in FP8_DTYPES]
    return dtype, numbers.choice(eight if eight and numbers.random() < 0.7 else others)


def _page_size(can: Capabilities, numbers: Random) -> int:
    multiple = can.page_size_multiple
    return numbers.choice(sorted(can.page_sizes or {max(1, size // multiple) * multiple for size in _PAGE_SIZES}))


def _features(can: Capabilities, numbers: Random, kind: AttentionType) -> list[str]:
    """Up to three of the declared ones, in the order in which they are given up."""
    names = _FEATURES if kind is AttentionType.DECODER else ("scale", "soft_cap", "sinks")
    declared = [name for name in names if name == "scale" or getattr(can, name)]
    if kind is AttentionType.DECODER and can.standard_alibi and not can.alibi:
        declared.append("alibi")
    picked = numbers.sample(declared, k=min(len(declared), numbers.choice((0, 1, 1, 2, 2, 3))))
    excluded = {"chunks"} & set(picked) if "window" in picked else set()
    excluded |= {"alibi"} & set(picked) if "rope" in picked else set()
    return [name for name in picked if name not in excluded]


def _feature(name: str, num_qo_heads: int, head_dim: int, model: PublishedModel, numbers: Random) -> dict[str, Any]:
    """Arguments of the layer: the model's own numbers where it has some, or drawn ones."""
    own = numbers.random() < 0.5
    if name == "window":
        drawn = int(2 ** numbers.uniform(0, 12)) - 1
        return {"window_left": model.window_left if own and model.window_left is not None else drawn}
    if name == "chunks":
        drawn = int(2 ** numbers.uniform(0, 12))
        return {"chunk_size": model.chunk_size if own and model.chunk_size is not None else drawn}
    if name == "soft_cap":
        cap = model.logits_soft_cap
        return {"logits_soft_cap": cap if own and cap is not None else numbers.uniform(1.0, 60.0)}
    if name == "alibi":
        return {"alibi_slopes": alibi_slopes(num_qo_heads)}
    if name == "rope":
        numbers = Random(f"rope {numbers.getstate()[1][:8]}")  # of its own: other draws stay what they were before it
        theta, scale = numbers.choice((1e4, 5e5, 1e6)), numbers.choice((1.0, numbers.uniform(0.5, 8.0)))
        return {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": theta, "rope_scale": scale}
    if name == "sinks":
        return {"sinks": True}
    return {"causal": False} if name == "non_causal" else {"scale": numbers.uniform(0.3, 1.3) * head_dim**-0.5}


def _scales(spec: AttentionSpec, numbers: Random, exact: bool) -> tuple[float, float]:
    """The scales of a cache of 8 bits, and of one in four of the others. Powers of two are exact in any order of
    work."""
    if spec.cache_dtype not in FP8_DTYPES and numbers.random() < 0.75:
        return 1.0, 1.0
    if exact:
        return 2.0 ** numbers.randint(-3, 2), 2.0 ** numbers.randint(-3, 2)
    return numbers.uniform(0.1, 3.0), numbers.uniform(0.1, 3.0)


def fits_all(size: Size, form: Form, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> bool:
    return all(fits(size, spec, query_lens, seq_lens) for spec in form.specs)
