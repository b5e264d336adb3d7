"""Arguments of the cache: the scales of every cache dtype, layouts, page sizes, dtypes, head dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attn_backends.spec import FP8_DTYPES, AttentionSpec, dtype_name
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.harness import assert_pool, output_error
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.judge import Drawn, Supposition, as_scaled
from attn_backends.testing.lint.subject import KINDS, BatchKind, Subject

_DECODES, _MIXED = KINDS[0], KINDS[3]
_MOST_VALUES = 4  # of a set of dims or page sizes that are run


def check_scales(subject: Subject) -> Iterator[Finding]:
    """Every declared cache dtype, with scales of keys and values that are far from each other and from 1."""
    for cache_dtype in sorted(subject.can.cache_dtypes, key=str):
        if subject.is_slow and cache_dtype not in (*subject.dtypes[:1], *FP8_DTYPES[:1]):
            continue
        specs = [subject.spec(dtype=dtype, cache_dtype=cache_dtype) for dtype in subject.dtypes]
        where = f"cache in {dtype_name(cache_dtype)}"
        spec = next((spec for spec in specs if not subject.rejected(spec)), specs[0])
        if refused := subject.rejected(spec):
            yield Finding("capability-refused", where, f"a plain layer with it is refused: {refused[0]}",
                          "Take it out of cache_dtypes, or serve it.")  # fmt: skip
            continue
        for kind in (_DECODES, _MIXED):
            yield from _scaled(subject, spec, kind, f"{where}, {kind.name}")


def _scaled(subject: Subject, spec: AttentionSpec, kind: BatchKind, where: str) -> Iterator[Finding]:
    numbers = subject.numbers(where)
    k_scale, v_scale = numbers.uniform(0.25, 0.45), numbers.uniform(1.9, 3.1)
    batch = subject.batch(spec, kind, numbers, k_scale=k_scale, v_scale=1.0 if subject.can.mla else v_scale)
    drawn = Drawn(batch, _misread(subject, batch))
    try:
        result = subject.run(batch, num_padded_reqs=kind.num_padded_reqs)
    except Exception as error:  # whatever a kernel library raises is the finding
        yield Finding("run-failed", where, f"{type(error).__name__}: {error}", "Serve it, or do not declare it.")
        return
    found = drawn.wrong(result)
    if isinstance(found, Supposition):
        yield Finding("argument-ignored", where, found.words, "A cached value times its scale is the real one.")
    elif found is not None:
        yield Finding("capability-wrong", where, found, "A cached value times its scale is the real one.")
    try:
        assert_pool(result.kv_cache, batch.pool_after(), "after a step", batch.has_exact_scales)
    except AssertionError as error:
        yield Finding("argument-ignored", where, f"keys or values are not written as real / scale: {error}",
                      "Divide by k_scale and v_scale, or leave `write` to the base.")  # fmt: skip
    if found is None and batch.fp8_queries:
        yield from _needless_rounding(result.output, replace(batch, fp8_queries=False), where)


def _misread(subject: Subject, batch: Batch) -> list[Supposition]:
    """The ways in which scales are mixed up."""
    k, v = batch.k_scale, batch.v_scale
    read: dict[str, tuple[float, float]] = {"k_scale is not read": (1.0, 1.0)} if subject.can.mla else {}
    read = read or {
        "k_scale is not read": (1.0, v),
        "v_scale is not read": (k, 1.0),
        "neither scale is read": (1.0, 1.0),
        "v_scale is read for keys": (v, v),
        "k_scale is read for values": (k, k),
        "k_scale and v_scale are exchanged": (v, k),
    }
    return [
        Supposition(f"{words}{' and written so' if writes_too else ''}", as_scaled(batch, *scales, writes_too))
        for writes_too in (False, True)
        for words, scales in read.items()
    ]


def _needless_rounding(output: torch.Tensor, exact: Batch, where: str) -> Iterator[Finding]:
    """`fp8_queries` asks for a tolerance of some per cent; who needs none gets none."""
    expected, _ = exact.expected()
    if output_error(output[: len(expected)], expected) <= exact.tolerance:
        yield Finding("capability-ignored", f"fp8_queries, {where}", "outputs are those of queries that nobody rounds",
                      "Do not declare fp8_queries: it only widens the tolerance.")  # fmt: skip


def check_values(subject: Subject) -> Iterator[Finding]:
    """One mixed batch for declared values: layouts, page sizes, dtypes, head dims."""
    can, numbers = subject.can, subject.numbers("values")
    multiple = can.page_size_multiple
    sizes = sorted(can.page_sizes or {multiple * numbers.choice((1, 2, 3)), multiple * 16, multiple * 5})
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((f"layout {layout}", {}, {"layout": layout}) for layout in sorted(can.layouts)),
        *((f"pages of {size}", {}, {"page_size": size}) for size in _some(subject, sizes)),
        *((f"dtype {dtype_name(dtype)}", {"dtype": dtype}, {}) for dtype in subject.dtypes[1:]),
        *((f"head_dim {dim}", {"head_dim": dim}, {}) for dim in _some(subject, sorted(can.head_dims or ()))
          if not can.mla),
    ]  # fmt: skip
    for where, changes, how in asked:
        yield from _value(subject, where, changes, how)


def check_layouts(subject: Subject) -> Iterator[Finding]:
    """A layout that is refused, and would be served right: strides are all that differs."""
    cheap = subject.device == "cpu" and not subject.is_slow and not subject.can.mla  # latent rows have one layout
    for layout in sorted({"NHD", "HND"} - subject.can.layouts) if cheap else ():
        batch = subject.batch(subject.spec(), _MIXED, subject.numbers(layout), layout=layout)
        if subject.honours(Drawn(batch)):
            yield Finding("capability-undeclared", f"layout {layout}", "outputs are right, and pools of it are refused",
                          "Declare it in layouts.")  # fmt: skip


def _value(subject: Subject, where: str, changes: dict[str, Any], how: dict[str, Any]) -> Iterator[Finding]:
    spec = subject.spec(**changes)
    if spec.cache_dtype not in subject.can.cache_dtypes:
        spec = replace(spec, cache_dtype=min(subject.can.cache_dtypes, key=str))
    if refused := subject.rejected(spec, **how):
        yield Finding("capability-refused", where, f"a plain layer with it is refused: {refused[0]}",
                      "Take it out of capabilities(), or serve it.")  # fmt: skip
        return
    drawn = Drawn(subject.batch(spec, _MIXED, subject.numbers(where), **how))
    try:
        result = subject.run(drawn.batch)
        found = drawn.wrong(result)
        assert_pool(result.kv_cache, drawn.batch.pool_after(), "after a step")
    except Exception as error:  # whatever a kernel library raises is the finding
        yield Finding("run-failed", where, f"{type(error).__name__}: {error}", "Serve it, or do not declare it.")
        return
    if found is not None:
        yield Finding("capability-wrong", where, str(found), "Compare with attn_backends.testing.reference.")


def _some(subject: Subject, values: list[int]) -> list[int]:
    """A few of many values, the first and the last among them."""
    most = 2 if subject.is_slow else _MOST_VALUES
    if len(values) <= most:
        return values
    between = subject.numbers("some", values).sample(values[1:-1], most - 2)
    return [values[0], *sorted(between), values[-1]]
