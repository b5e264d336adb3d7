"""What a backend declares, as factors with values: what `attn-backends verify --declared` runs in all pairs.

A finite set stands whole. An open range (`None` in `Capabilities`) stands with its ends and 8 values between them,
which are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from random import Random

import torch

from attn_backends.interface.capabilities import Capabilities
from attn_backends.spec import dtype_name
from attn_backends.testing.cases.models import published_models
from attn_backends.testing.harness import Backend

Value = str | int
Factors = dict[str, tuple[Value, ...]]

NUM_DRAWN = 8
LARGEST_PAGE = 256
LARGEST_HEAD_DIM = 512
LARGEST_NOPE_DIM = 256  # of MLA's queries and keys without their RoPE part
KINDS = ("decode", "verify", "chunk", "mixed", "skewed", "prefix", "told prefix", "prompts", "profile")
EAGER, GRAPH, WIDE_GRAPH, MIXED_GRAPH = "eager", "graph of one token", "graph of several tokens", "graph of any batch"
_SWITCH = ("off", "on")

# The factors that stand for each field of Capabilities; none: why there is nothing to run.
FIELDS: Mapping[str, tuple[str, ...] | str] = {
    "devices": "a run is on one device, and says which",
    "dtypes": ("dtype",),
    "cache_dtypes": ("cache_dtype",),
    "head_dims": ("head_dim",),
    "page_sizes": ("page_size",),
    "page_size_multiple": ("page_size",),
    "layouts": ("layout",),
    "attention_types": ("attention_type",),
    "window": ("window",),
    "soft_cap": ("soft_cap",),
    "alibi": ("alibi",),
    "standard_alibi": ("alibi",),  # all layers that are drawn have the paper's slopes
    "rope": ("rope",),
    "sinks": ("sinks",),
    "chunks": ("chunks",),
    "non_causal": ("non_causal",),
    "unequal_head_dims": ("head_dim_vo",),
    "any_scale": ("scale",),
    "lse": ("lse",),
    "fp8_queries": "how a cache of fp8 is read: cache_dtype has those",
    "cascade": "what a backend makes of a prefix that it is told of: all are told of one in a kind of batch",
    "cuda_graph": ("run",),
    "min_compute_capability": "a run is on one GPU, and says which",
    "head_counts": ("num_qo_heads",),
    "mla": ("kv_lora_rank",),
    "kv_lora_ranks": ("kv_lora_rank",),
    "qk_rope_head_dims": ("qk_rope_head_dim",),
    "lowest_logit": "a bound on what may come back, and no input",
}


def factors(backend: Backend) -> Factors:
    """The factors of a backend in order, each with the values that it declares; the plainest value is the first.

    Raises:
        ValueError: `Capabilities` has a field that no factor stands for.
    """
    can = backend.capabilities()
    unknown = [field.name for field in fields(can) if field.name not in FIELDS]
    if unknown:
        raise ValueError(f"no factor stands for {', '.join(unknown)} of Capabilities; name it in FIELDS of factors.py")
    found: Factors = {"dtype": _names(can.dtypes), "cache_dtype": _names(can.cache_dtypes)}
    found |= _latent_heads(can, backend) if can.mla else _heads(can, backend)
    if can.unequal_head_dims:
        found["head_dim_vo"] = ("same", "smaller", "larger")
    found["page_size"] = _page_sizes(can, backend)
    found["layout"] = tuple(sorted(can.layouts, reverse=True))
    found["attention_type"] = tuple(sorted(each.value for each in can.attention_types))
    found |= {name: _SWITCH for name in ("soft_cap", "alibi", "sinks", "non_causal", "lse") if getattr(can, name)}
    if can.standard_alibi and not can.alibi:
        found["alibi"] = _SWITCH
    if can.rope:
        found["rope"] = ("off", "on", "scaled")
    if can.window:
        found["window"] = ("off", "0", "on")  # keys to the left; 0: a query sees itself alone
    if can.chunks:
        found["chunks"] = ("off", "1", "on")  # positions
    if not can.mla:
        found["interleaved"] = _SWITCH
    graphs = [GRAPH, WIDE_GRAPH, MIXED_GRAPH][: int(can.cuda_graph)]
    return found | {
        "scale": ("default", "other", "not above 0") if can.any_scale else ("default", "other"),
        "kv_scales": ("1", "powers of 2", "others"),
        "kind": KINDS,
        "run": (EAGER, *graphs),
    }


def restricted(given: Factors, where: Iterable[str]) -> Factors:
    """Factors of which some have but the values that are named, as `name=value,value`.

    Raises:
        ValueError: there is no such factor, or it has no such value.
    """
    found = dict(given)
    for words in where:
        name, _, wanted = words.partition("=")
        if name not in given:
            raise ValueError(
                f"--where {words}: there is no {name!r} here; write NAME=VALUE,VALUE of {', '.join(given)}"
            )
        unknown = set(wanted.split(",")) - set(map(str, given[name]))
        if unknown:
            allowed = ", ".join(map(str, given[name]))
            raise ValueError(f"--where {words}: {name} is none of {', '.join(sorted(unknown))}; allowed: {allowed}")
        found[name] = tuple(value for value in found[name] if str(value) in wanted.split(","))
    return found


def _heads(can: Capabilities, backend: Backend) -> Factors:
    models = [model for model in published_models() if not model.is_mla]
    groups = {model.num_qo_heads // model.num_kv_heads for model in models}
    found: Factors = {
        "head_dim": _declared(can.head_dims) or _open(backend, "head_dim", 1, LARGEST_HEAD_DIM, (64, 96, 128, 256)),
        "group": _some(backend, "group", groups | {1}),  # query heads of a KV head
    }
    if can.head_counts is not None:
        found["num_qo_heads"] = _declared(can.head_counts)
    return found


def _latent_heads(can: Capabilities, backend: Backend) -> Factors:
    """MLA: `head_dim` is the part without RoPE where any is declared, and the whole where some are."""
    counts = {model.num_qo_heads // n for model in published_models() if model.is_mla for n in (1, 2, 4, 8, 16)}
    found: Factors = {
        "num_qo_heads": _declared(can.head_counts) or _some(backend, "num_qo_heads", counts | {1}),
        "kv_lora_rank": _declared(can.kv_lora_ranks) or _open(backend, "kv_lora_rank", 1, 512, (256,)),
        "qk_rope_head_dim": _declared(can.qk_rope_head_dims) or _open(backend, "qk_rope_head_dim", 1, 128, (32, 64)),
    }
    if can.head_dims is None:
        found["qk_nope_head_dim"] = _open(backend, "qk_nope_head_dim", 1, LARGEST_NOPE_DIM, (64, 128, 192))
    else:
        found["head_dim"] = _declared(can.head_dims)
    return found


def _page_sizes(can: Capabilities, backend: Backend) -> tuple[Value, ...]:
    if can.page_sizes is not None:
        return _declared(frozenset(size for size in can.page_sizes if size % can.page_size_multiple == 0))
    step = can.page_size_multiple
    usual = [size // step for size in (16, 64) if size % step == 0 and size > step]
    return tuple(step * int(n) for n in _open(backend, "page_size", 1, max(1, LARGEST_PAGE // step), usual))


def _declared(values: Iterable[int] | None) -> tuple[Value, ...]:
    return tuple(sorted(values or ()))


def _open(backend: Backend, name: str, low: int, high: int, usual: Iterable[int] = ()) -> tuple[Value, ...]:
    """The ends of an open range, usual values and what is drawn between, small numbers as often as large ones."""
    numbers, drawn = Random(f"{name} of {backend.get_name()}"), {low, high, *usual}
    while len(drawn) < min(NUM_DRAWN + 2, high - low + 1):
        drawn.add(round(math.exp(numbers.uniform(math.log(low), math.log(high)))))
    return tuple(sorted(drawn))


def _some(backend: Backend, name: str, values: set[int]) -> tuple[Value, ...]:
    """The ends of a set, and `NUM_DRAWN` of what lies between them."""
    low, *inner, high = sorted(values)
    drawn = Random(f"{name} of {backend.get_name()}").sample(inner, min(NUM_DRAWN, len(inner)))
    return (low, *sorted(drawn), high)


def _names(dtypes: Iterable[torch.dtype]) -> tuple[Value, ...]:
    return tuple(sorted(map(dtype_name, dtypes), key=_plainness))


def _plainness(name: str) -> tuple[int, str]:
    plain = ("float16", "bfloat16", "float32")
    return (plain.index(name) if name in plain else len(plain)), name
