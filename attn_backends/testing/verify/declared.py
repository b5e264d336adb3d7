"""The layer and the case that have given values of a backend's factors, and the rule that refuses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch

from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec, alibi_slopes
from attn_backends.testing.harness import Backend
from attn_backends.testing.verify.cases import GRAPH_TOKENS, Case, Episode, case_of, draw_episode
from attn_backends.testing.verify.factors import EAGER, GRAPH, LARGEST_HEAD_DIM, MIXED_GRAPH, WIDE_GRAPH
from attn_backends.testing.verify.layers import Form
from attn_backends.testing.verify.pairs import Row
from attn_backends.testing.verify.sizes import Size
from attn_backends.testing.verify.values import kind_of

MEANINGLESS = "no such case"  # values that exclude each other in what they mean
OF_DECODERS = ("kind", "non_causal")  # factors that layers of other attention types have no value of
_KV_HEADS = (1, 2, 3, 4, 5, 8, 16, 32, 64)
_MOST_QO_HEADS = 128
_MOST_NUMBERS = 8192  # of a query of all heads, as in models of 70 billion parameters
_USUAL_DIMS = (16, 32, 64, 80, 96, 128, 192, 256, LARGEST_HEAD_DIM)
_FEWEST_EXPANDED = 8  # an output of fewer expanded values may be near zero, where no relative error is small
_TRIES = 20  # to draw batches that are of their kind once they are within the size
_MORE_WORK, _SHORT = (1.0, 4.0, 16.0, 64.0, 256.0), 256  # then: times the size's limits, and keys of a request
_RUNS_OF_KIND = {"decode": (EAGER, GRAPH), "verify": (EAGER, WIDE_GRAPH)}
_RUNS_OF_OTHERS = (EAGER, GRAPH, WIDE_GRAPH)
_KINDS_OF_GRAPHS = ("decode", "verify", "skewed", "prefix", "told prefix")


class NoSuchLayerError(ValueError):
    """Values that no layer has together."""


def refusal(backend: Backend, row: Row, device: str) -> str | None:
    """Why no case has these values: codes of `backend.reject`, or one of this module's reasons; None: one has them."""
    is_decoder = row["attention_type"] == "decoder"
    if is_decoder != (row.get("kind") is not None) or (not is_decoder and "non_causal" in row):
        return MEANINGLESS
    if (why := _not_in_a_graph(row)) is not None:
        return why
    try:
        spec, rejected = _layer(backend, row, device)
    except NoSuchLayerError:
        return MEANINGLESS
    if row.get("interleaved") == "on" and spec.head_dim != spec.head_dim_vo:
        return MEANINGLESS
    return rejected or None


def _not_in_a_graph(row: Row) -> str | None:
    """Graphs hold steps of decoders over a cache, and but for those of any batch rows of equal tokens."""
    run, kind = row["run"], row.get("kind")
    if run == EAGER:
        return None
    if run == MIXED_GRAPH:
        return None if kind not in (None, "profile") else "cuda_graph"
    if kind not in _KINDS_OF_GRAPHS:
        return "cuda_graph"
    return None if run in _RUNS_OF_KIND.get(kind, _RUNS_OF_OTHERS) else MEANINGLESS


def draw_declared(
    backend: Backend, row: Row, seed: int, size: Size, device: str, multiprocessors: int | None = None
) -> Case:
    """A case that has the values of a row; what they leave open follows from the seed."""
    numbers, can = Random(f"declared {seed}"), backend.capabilities()
    spec, _ = _layer(backend, row, device)
    scales = _kv_scales(row["kv_scales"], numbers)
    form = Form(
        ("declared",), (spec,), ((scales[0], 1.0) if can.mla else scales,), row["page_size"], row["layout"],
        row.get("interleaved") == "on", Counter(),
    )  # fmt: skip
    tokens = {EAGER: 0, MIXED_GRAPH: 0, GRAPH: 1}.get(row["run"], numbers.randint(2, GRAPH_TOKENS))
    size = size.scaled(2.0 ** -numbers.uniform(0, size.spread))
    episodes = tuple(_episode(form, row, size, numbers, tokens) for _ in range(numbers.randint(1, size.num_episodes)))
    is_mixed = row["run"] == MIXED_GRAPH
    case = case_of(backend, seed, form, episodes, tokens > 0 or is_mixed, numbers, multiprocessors, is_mixed)
    return replace(case, want_lse=row.get("lse") == "on")


def _episode(form: Form, row: Row, size: Size, numbers: Random, tokens: int) -> Episode:
    """One that is of the row's kind, with few and short requests and more work than else if it takes that."""
    kind, few = row.get("kind"), replace(size, max_rows=2, max_context=_SHORT)
    for limits in (size, *(few.scaled(work) for work in _MORE_WORK)):
        for _ in range(_TRIES):
            drawn = draw_episode(form, limits, numbers, tokens, "prefix" if kind == "told prefix" else kind)
            drawn = replace(drawn, hint=kind != "prefix")
            if kind is None or kind_of(drawn) == kind:
                return drawn
    return drawn


def _layer(backend: Backend, row: Row, device: str) -> tuple[AttentionSpec, str]:
    """The layer, which follows from the row alone, and the codes of what refuses it.

    Raises:
        NoSuchLayerError: there is none.
    """
    numbers = Random(repr(sorted(row.items())))
    can, cache = backend.capabilities(), KVCacheSpec(64, row["page_size"], row["layout"])
    given: dict[str, Any] = {**_head_dims(backend, row, numbers), **_features(row, numbers)}
    given |= {"dtype": getattr(torch, row["dtype"]), "cache_dtype": getattr(torch, row["cache_dtype"])}
    codes = ""
    for heads in _heads(row, given, numbers):
        slopes = {"alibi_slopes": alibi_slopes(heads["num_qo_heads"])} if row.get("alibi") == "on" else {}
        try:
            spec = (MLASpec if can.mla else AttentionSpec)(**{**given, **heads, **slopes})
        except ValueError as error:
            raise NoSuchLayerError(str(error)) from error
        codes = "+".join(sorted({rejection.code for rejection in backend.reject(spec, cache, device)}))
        if not codes:
            return spec, ""
    return spec, codes


def _heads(row: Row, given: Mapping[str, Any], numbers: Random) -> list[dict[str, int]]:
    """Numbers of heads with the row's group, or the row's number, in the order in which they are tried."""
    if "group" not in row:
        return [{"num_qo_heads": row["num_qo_heads"]}]
    group = row["group"]
    if "num_qo_heads" in row:
        if row["num_qo_heads"] % group:
            raise NoSuchLayerError(f"groups of {group} of {row['num_qo_heads']} heads")
        return [{"num_qo_heads": row["num_qo_heads"], "num_kv_heads": row["num_qo_heads"] // group}]
    most = min(_MOST_QO_HEADS, _MOST_NUMBERS // max(given["head_dim"], given["head_dim_vo"]))
    fitting = [kv for kv in _KV_HEADS if kv * group <= most or kv == 1]
    tried = numbers.sample(fitting, k=len(fitting))
    return [{"num_qo_heads": kv * group, "num_kv_heads": kv} for kv in tried]


def _head_dims(backend: Backend, row: Row, numbers: Random) -> dict[str, int]:
    can, found = backend.capabilities(), dict[str, int]()
    if can.mla:
        found = {"kv_lora_rank": row["kv_lora_rank"], "qk_rope_head_dim": row["qk_rope_head_dim"]}
    dim = row["head_dim"] if "head_dim" in row else row["qk_nope_head_dim"] + row["qk_rope_head_dim"]
    any_dim = range(_FEWEST_EXPANDED if can.mla else 1, LARGEST_HEAD_DIM + 1)
    dims = sorted(can.head_dims or (_USUAL_DIMS if numbers.random() < 0.5 else any_dim))
    chosen = {"smaller": [d for d in dims if d < dim], "larger": [d for d in dims if d > dim]}
    compared = row.get("head_dim_vo", "same")
    if compared == "same":
        return found | {"head_dim": dim, "head_dim_vo": dim}
    if not chosen[compared]:
        raise NoSuchLayerError(f"a head_dim_vo {compared} than {dim}")
    return found | {"head_dim": dim, "head_dim_vo": numbers.choice(chosen[compared])}


def _features(row: Row, numbers: Random) -> dict[str, Any]:
    found: dict[str, Any] = {"attention_type": row["attention_type"]}
    if row["attention_type"] != "decoder" or row.get("non_causal") == "on":
        found["causal"] = False
    drawn = max(2, int(2 ** numbers.uniform(1, 12)))
    if row.get("window", "off") != "off":
        found["window_left"] = 0 if row["window"] == "0" else drawn - 1
    if row.get("chunks", "off") != "off":
        found["chunk_size"] = 1 if row["chunks"] == "1" else drawn
    if row.get("soft_cap") == "on":
        found["logits_soft_cap"] = numbers.uniform(1.0, 60.0)
    if row.get("rope", "off") != "off":
        found["pos_encoding_mode"] = "ROPE_LLAMA"
    if row.get("rope") == "scaled":
        found |= {"rope_scale": numbers.uniform(0.5, 8.0), "rope_theta": numbers.choice((5e5, 1e6))}
    if row.get("sinks") == "on":
        found["sinks"] = True
    if row["scale"] != "default":
        dim = row["head_dim"] if "head_dim" in row else row["qk_nope_head_dim"] + row["qk_rope_head_dim"]
        found["scale"] = numbers.uniform(0.3, 1.3) * dim**-0.5
    if row["scale"] == "not above 0":
        found["scale"] = numbers.choice((0.0, -found["scale"], -found["scale"]))
    return found


def _kv_scales(wanted: str, numbers: Random) -> tuple[float, float]:
    if wanted == "1":
        return 1.0, 1.0
    if wanted == "powers of 2":
        return 2.0 ** numbers.choice((-3, -2, -1, 1, 2)), 2.0 ** numbers.randint(-3, 2)
    return numbers.uniform(0.1, 3.0), numbers.uniform(0.1, 3.0)
