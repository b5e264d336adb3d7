"""Drives a backend through the interface alone: plan group, builder, state, impl, one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionBackend, AttentionState, AttentionStep
from attn_backends.spec import Limits, PlanGroup, plan_groups
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.guards.guard import GuardBands

Backend = type[AttentionBackend]
_PRODUCTS_OF_AN_ADDITION = 8  # that a tensor core of Hopper adds to a sum at once
_SUMS_AT_ONCE = 1 << 22  # 32 MB in float64


@dataclass(frozen=True)
class Result:
    """What one step gave back. Padded rows are the last ones of `output` and `lse`."""

    output: torch.Tensor  # [num_tokens, num_qo_heads, head_dim_vo]
    lse: torch.Tensor | None  # [num_tokens, num_qo_heads] f32
    kv_cache: KVCache | None


class Layer:
    """One layer: its builder, its impl, and a state that it may share with layers of other plan groups.

    What it is given and what it allocates lies in guard bands, which are compared after every call.
    """

    def __init__(
        self,
        backend: Backend,
        group: PlanGroup[Any],
        state: AttentionState[Any],
        batch: Batch,
        limits: Limits,
        options: Any = None,
        guards: GuardBands | None = None,
    ) -> None:
        self.state = state
        self.guards = guards or GuardBands(unowned_page([batch]))
        with self.guards.watching():
            self.builder = backend.get_builder_cls()(group, batch.cache, limits, batch.device, options=options)
            self.impl = backend.get_impl_cls()(
                batch.spec, batch.cache, batch.device, k_scale=batch.k_scale, v_scale=batch.v_scale, options=options,
                **batch.weights,
            )  # fmt: skip

    def begin(self, batch: Batch, common_prefix_len: int = 0, num_padded_reqs: int = 0) -> AttentionStep[Any]:
        """Build and plan a step."""
        return self.plan(batch.common(num_padded_reqs), common_prefix_len)

    def plan(self, common: CommonAttentionMetadata, common_prefix_len: int = 0) -> AttentionStep[Any]:
        """Build and plan a step of a batch that was compiled already, by the clone of a graph's."""
        placed = self.guards.place_batch(common)
        with self.guards.watching():
            return self.state.step_for(self.builder.build(common_prefix_len, placed))

    def forward(
        self,
        batch: Batch,
        step: AttentionStep[Any],
        *,
        num_padded_reqs: int = 0,
        want_lse: bool = False,
        kv_cache: KVCache | None = None,
    ) -> Result:
        """Run a planned step over a clone of the batch's pool, or over `kv_cache` if it is given.

        Raises:
            GuardError: something was written beyond a tensor, or to an input.
        """
        place, fresh = self.guards.place, batch.fresh_pool() if kv_cache is None else None
        if fresh is not None:
            kv_cache = KVCache(*map(place, fresh))
        query = place(padded(batch.query, num_padded_reqs), read_only=True)
        key, value = (
            place(padded(new, num_padded_reqs), read_only=True) if len(new) else None
            for new in (batch.key, batch.value)
        )
        lse = (
            place(torch.full(query.shape[:2], torch.nan, dtype=torch.float32, device=batch.device))
            if want_lse
            else None
        )
        with self.guards.watching():
            output = self.impl.forward(query, key, value, kv_cache, step, lse=lse)
        self.guards.check("after forward()")
        return Result(output, lse, kv_cache)

    def run(self, batch: Batch, common_prefix_len: int = 0, num_padded_reqs: int = 0, **how: Any) -> Result:
        """Build, plan and run a step; `how` is `forward`'s."""
        step = self.begin(batch, common_prefix_len, num_padded_reqs)
        return self.forward(batch, step, num_padded_reqs=num_padded_reqs, **how)


def make_layers(
    backend: Backend,
    layers: Sequence[Batch],
    *more: Batch,
    num_padded_reqs: int = 0,
    options: Any = None,
    roomy: int = 1,
) -> tuple[Layer, ...]:
    """Layers that share one state, a plan group each, sized for their batches and `more`, `roomy` times over."""
    limits = limits_for(*layers, *more, num_padded_reqs=num_padded_reqs)
    limits = Limits(*(roomy * number for number in vars(limits).values()))
    groups = plan_groups({i: batch.spec for i, batch in enumerate(layers)})
    guards = GuardBands(unowned_page([*layers, *more]))
    with guards.watching():
        state = backend.get_state_cls()(groups, layers[0].cache, limits, layers[0].device, options=options)
    pairs = zip(groups, layers, strict=True)
    return tuple(Layer(backend, group, state, batch, limits, options, guards) for group, batch in pairs)


def make_layer(backend: Backend, *batches: Batch, num_padded_reqs: int = 0, options: Any = None) -> Layer:
    """One layer for any of some batches that differ in their rows alone."""
    (layer,) = make_layers(backend, batches[:1], *batches[1:], num_padded_reqs=num_padded_reqs, options=options)
    return layer


def run_backend(
    backend: Backend,
    batch: Batch,
    *,
    common_prefix_len: int = 0,
    num_padded_reqs: int = 0,
    options: Any = None,
    **how: Any,
) -> Result:
    """One step, from a new builder to the output; `how` is `Layer.forward`'s."""
    layer = make_layer(backend, batch, num_padded_reqs=num_padded_reqs, options=options)
    return layer.run(batch, common_prefix_len, num_padded_reqs, **how)


def unowned_page(batches: Sequence[Batch]) -> int:
    """The last page of the pool that no request of these batches owns; 0, which tables are padded with, if none is."""
    owned = {int(page) for batch in batches for row in batch.rows for page in (row.data.pages or ())}
    return max((page for page in range(min(batch.cache.pages for batch in batches)) if page not in owned), default=0)


def limits_for(*batches: Batch, num_padded_reqs: int = 0) -> Limits:
    """Exactly what these batches need, so that a buffer sized a little too small shows."""
    return Limits(
        max_num_requests=max(len(batch.rows) for batch in batches) + num_padded_reqs,
        max_num_tokens=max(sum(row.data.query_len for row in batch.rows) for batch in batches) + num_padded_reqs,
        max_model_len=max(max(1, row.data.seq_len) for batch in batches for row in batch.rows),
    )


def padded(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`num_rows` of NaN behind a tensor: what stands there must not matter."""
    return torch.cat([tensor, tensor.new_full((num_rows, *tensor.shape[1:]), torch.nan)])


def output_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a token, norm(out - ref) / norm(ref); inf where something is not finite."""
    got = output.detach().to(expected.device, torch.float64).flatten(1)
    expected = expected.flatten(1)
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
    return float(errors.max()) if len(errors) else 0.0


def lse_error(lse: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of an LSE, relative to it where it is above 1; inf where it is not infinite as expected, or NaN."""
    got = lse.detach().to(expected.device, torch.float64)
    if got.shape != expected.shape or not torch.equal(got == -torch.inf, expected == -torch.inf):
        return float("inf")
    live = expected > -torch.inf
    errors = (got[live] - expected[live]).abs() / expected[live].abs().clamp_min(1.0)
    return float(errors.nan_to_num(nan=torch.inf).max()) if errors.numel() else 0.0


def cut_off_by_tensor_cores(batch: Batch) -> float:
    """What an LSE may be off by where a GPU's tensor cores add up the products of float32 queries and keys.

    They align some products with the sum so far, add them, and cut off what is below the sum's last place (Fasi et al.
    2021, doi 10.7717/peerj-cs.330), eight products at a time on Hopper. So every sum is too small, by about an ulp for
    each addition. Of products of one sign nothing makes that good again, and an LSE near zero shows all of it: an
    addition may lose 2^-24 of the largest sum of absolute products here.
    """
    columns, largest = 0, 0.0
    for row in batch.rows:
        query, key = (each.abs() for each in batch.multiplied(row))
        columns, num_kv_heads = query.shape[2], key.shape[1]
        by_head = query.reshape(len(query), num_kv_heads, -1, columns)
        at_once = max(1, _SUMS_AT_ONCE // (query.shape[1] * max(1, len(key))))
        for part in by_head.split(at_once) if len(key) else ():
            largest = max(largest, float(torch.einsum("thgd,khd->thgk", part, key).max()))
    return columns / _PRODUCTS_OF_AN_ADDITION * 2.0**-24 * abs(batch.spec.scale) * largest


def lse_off_by(lse: torch.Tensor, expected: torch.Tensor, batch: Batch) -> tuple[float, float]:
    """The error of an LSE (see `lse_error`), and what is allowed."""
    error, allowed = lse_error(lse, expected), max(batch.tolerance, load_cases().tolerance(torch.float32))
    if allowed < error < torch.inf and batch.device.type != "cpu" and batch.spec.dtype is torch.float32:
        allowed = max(allowed, cut_off_by_tensor_cores(batch))
    return error, allowed


Expected = tuple[torch.Tensor, torch.Tensor]


def assert_matches(result: Result, batch: Batch, what: str = "the batch", expected: Expected | None = None) -> None:
    """The result equals the reference: outputs, the LSE if there is one, and zeros in padded rows.

    Raises:
        AssertionError: it does not; says which of them, by how much, and what is allowed.
    """
    out, lse = batch.expected() if expected is None else expected
    allowed, live = batch.tolerance, len(out)
    assert result.output.dtype == batch.spec.dtype, f"{what}: output is {result.output.dtype}, not {batch.spec.dtype}"
    error = output_error(result.output[:live], out)
    assert error <= allowed, f"{what}: output is off by {error:.2e} (relative, worst token); allowed {allowed:.0e}"
    idle = result.output[live:]
    assert bool((idle == 0).all()), f"{what}: padded rows of the output are not zero: {idle.flatten()[:4].tolist()}"
    if result.lse is not None:
        error, allowed = lse_off_by(result.lse[:live], lse, batch)
        assert error <= allowed, (
            f"{what}: lse is off by {error:.2e} (natural log, sinks included); allowed {allowed:.0e}"
        )
        assert bool((result.lse[live:] == -torch.inf).all()), f"{what}: lse of padded rows is not -inf"


def assert_pool(
    kv_cache: KVCache | None, expected: KVCache | None, what: str = "the batch", exact: bool = True
) -> None:
    """The pool after a step: the new slots as they should be, and every other byte as it was.

    Args:
        exact: byte for byte. Without, numbers may be neighbours, as quotients are rounded in one way or another (see
            `Batch.has_exact_scales`).

    Raises:
        AssertionError: it is not; says which slots differ.
    """
    assert (kv_cache is None) == (expected is None), f"{what}: the pool is {kv_cache}"
    if kv_cache is not None and expected is not None:
        for name, got, want in zip(kv_cache._fields, kv_cache, expected, strict=True):
            slots = _wrong_slots(got, want, exact).nonzero().flatten().tolist()
            assert not slots, f"{what}: {len(slots)} slots of the {name} cache are not as they should be: {slots[:8]}"


def assert_step(
    result: Result,
    batch: Batch,
    what: str = "the batch",
    expected: Expected | None = None,
    pool: KVCache | None = None,
) -> None:
    """`assert_matches`, and the pool holds what the step writes: `pool` if it was worked out before."""
    assert_matches(result, batch, what, expected)
    assert_pool(result.kv_cache, batch.pool_after() if pool is None else pool, what, batch.has_exact_scales)


def _wrong_slots(got: torch.Tensor, want: torch.Tensor, exact: bool) -> torch.Tensor:  # [num_slots] bool
    differs = (_slot_bytes(got) != _slot_bytes(want)).any(dim=1)
    if exact or not bool(differs.any()):
        return differs
    number = torch.finfo(got.dtype)
    units = 1 if got.itemsize <= 2 else 4  # of float32 a GPU's own quotients are two off
    one, other = (tensor.double().flatten(0, 1).flatten(1) for tensor in (got, want))
    near = (one - other).abs() <= units * number.eps * other.abs().clamp_min(number.smallest_normal)
    return differs & ~near.all(dim=1)


def _slot_bytes(cached: torch.Tensor) -> torch.Tensor:  # [num_slots, bytes of a slot] u8
    return cached.contiguous().view(torch.uint8).flatten(0, 1).flatten(1)
