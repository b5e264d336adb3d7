"""A backend's quick correctness run, for `attn-backends doctor`. A second or so; needs no pytest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attn_backends.spec import FP8_DTYPES, AttentionSpec
from attn_backends.testing.cases.cases import BatchShape, load_cases
from attn_backends.testing.cases.features import CROSS, ENCODER, feature, plain_cache, plain_spec, undeclared
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Backend, assert_matches, assert_pool, output_error, run_backend

MIXED = load_cases().batches["mixed_small"]
WHOLE_PROMPTS = BatchShape(seq_lens=(5, 17), query_lens=(5, 17))
SHAPES = {"decode": "page_edges_16", "chunked prefill": "small_prefill", "several query tokens": "spec_verify"}
FEATURES = ("scale", "window_15", "soft_cap", "alibi", "standard_alibi", "rope", "sinks", "chunks",
            "non_causal", "gemma2", "gpt_oss")  # fmt: skip


@dataclass(frozen=True)
class CheckResult:
    """One line of a doctor's report. A refusal of what the backend does not declare is ok, and says so."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class _Check:
    name: str
    changes: dict[str, Any] = field(default_factory=dict)  # of the plain layer
    shape: BatchShape = MIXED
    how: dict[str, Any] = field(default_factory=dict)  # arguments of random_batch
    prefix_pages: int = 0
    num_padded_reqs: int = 0


def quick_check(backend: Backend, device: str = "cpu") -> list[CheckResult]:
    """Compare some twenty small batches with the float64 reference, and their pools byte for byte."""
    return [_run(check, backend, device) for check in _checks(backend)]


def _checks(backend: Backend) -> Iterator[_Check]:
    yield _Check("mixed batch")
    for name, shape in SHAPES.items():
        yield _Check(name, shape=load_cases().batches[shape])
    yield _Check("whole prompts", shape=WHOLE_PROMPTS)
    yield _Check("profile run", shape=WHOLE_PROMPTS, how={"cached": False})
    yield _Check("padded rows in a pool of NaN", how={"poison": float("nan")}, num_padded_reqs=2)
    yield _Check("shared prefix", prefix_pages=1)
    heads = plain_spec(backend.capabilities()).num_qo_heads
    for name in FEATURES:
        yield _Check(name, feature(name).spec_changes(heads))
    yield _Check("encoder", ENCODER.spec_changes(heads), WHOLE_PROMPTS)
    yield _Check("cross", CROSS.spec_changes(heads))
    for dtype in FP8_DTYPES:
        scales = {"k_scale": 0.5, "v_scale": 2.0}
        yield _Check(f"cache in {str(dtype).removeprefix('torch.')}", {"cache_dtype": dtype}, how=scales)


def _run(check: _Check, backend: Backend, device: str) -> CheckResult:
    can = backend.capabilities()
    spec = plain_spec(can, **check.changes)
    cache = plain_cache(can)
    rejections = backend.reject(spec, cache, device)
    codes = {rejection.code for rejection in rejections}
    silent = undeclared(backend, spec, cache, device) - codes
    if silent:
        return CheckResult(check.name, False, f"not declared, and not refused either: {', '.join(sorted(silent))}")
    if rejections:  # in order, unless it is the plain layer
        return CheckResult(check.name, bool(check.changes), f"refused: {', '.join(sorted(codes))}")
    try:
        return CheckResult(check.name, True, _compare(check, backend, spec, device))
    except Exception as error:  # whatever a kernel library raises is the finding
        return CheckResult(check.name, False, f"{type(error).__name__}: {error}")


def _compare(check: _Check, backend: Backend, spec: AttentionSpec, device: str) -> str:
    """The error and what is allowed, as text. Raises `AssertionError` if it is too large."""
    can, cache = backend.capabilities(), plain_cache(backend.capabilities())
    prefix = check.prefix_pages * cache.page_size
    seq_lens = [prefix + seq_len for seq_len in check.shape.seq_lens]
    batch = random_batch(
        backend, spec, seq_lens, check.shape.query_lens, page_size=cache.page_size, layout=cache.layout, device=device,
        shared_prefix_len=prefix, fp8_queries=can.fp8_queries, **check.how,
    )  # fmt: skip
    expected = batch.expected()
    told = {"common_prefix_len": prefix, "num_padded_reqs": check.num_padded_reqs, "want_lse": can.lse}
    result = run_backend(backend, batch, **told)
    assert_matches(result, batch, expected=expected)
    assert_pool(result.kv_cache, batch.pool_after())
    error = output_error(result.output[: len(expected[0])], expected[0])
    return f"error {error:.1e}, allowed {batch.tolerance:.0e}"
