"""The kit finds what it should in the MLA family: TORCH_MLA broken in many ways, each caught by a case of the kit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from attn_backends.backends.mla.metadata import DecodeRows, PrefillRows
from attn_backends.backends.mla.torch_mla.backend import TorchMLABackend
from attn_backends.backends.mla.torch_mla.impl import TorchMLAImpl
from attn_backends.backends.mla.torch_mla.metadata import TorchMLAMetadataBuilder
from attn_backends.backends.mla.torch_mla.state import Part, TorchMLAState
from attn_backends.interface import AttentionBackend
from attn_backends.spec import MLASpec
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.conformance import MLAConformance
from tests.helpers.mutants import with_seq_lens

Backend = type[AttentionBackend]
SQUARE = BatchShape(seq_lens=(24,), query_lens=(12,))  # as much context as new tokens
DECODE, F32, FP8 = "small_decode", torch.float32, torch.float8_e4m3fn


def mutant(impl: type = TorchMLAImpl, state: type = TorchMLAState, **methods: Any) -> Backend:
    body = {"impl_cls": impl, "state_cls": state, **methods}
    return type("Mutant", (TorchMLABackend,), body)


class UnscaledRoPE(TorchMLAImpl):
    """Takes the scale of q_nope alone, as a model without shared keys has it."""

    def attend(self, *args: Any) -> None:
        with mock.patch.object(self, "spec", replace(self.spec, scale=self.spec.qk_nope_head_dim**-0.5)):
            super().attend(*args)


class HeadsExchanged(TorchMLAImpl):
    """Values of the next head's weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.w_uv = self.w_uv.roll(1, 0)


class SplitsHeadsInHalves(TorchMLAImpl):
    """Takes q_nope for as wide as values, as it is in DeepSeek's models."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        halves = self.kv_b_proj.view(self.spec.num_qo_heads, -1, self.spec.kv_lora_rank).chunk(2, dim=1)
        wide = self.spec.qk_nope_head_dim, self.spec.head_dim_vo
        padded = [
            F.pad(half, (0, 0, 0, max(0, n - half.shape[1])))[:, :n] for half, n in zip(halves, wide, strict=True)
        ]
        self.w_uk, self.w_uv = padded[0], padded[1].mT


class ScaleOfValues(TorchMLAImpl):
    """The scale of a head dim that is taken from values."""

    def attend(self, *args: Any) -> None:
        spec, wide = self.spec, self.spec.head_dim_vo + self.spec.qk_rope_head_dim
        scale = wide**-0.5 if spec.scale == spec.head_dim**-0.5 else spec.scale
        with mock.patch.object(self, "spec", replace(spec, scale=scale)):
            super().attend(*args)


class NoSharedKey(TorchMLAImpl):
    def _decode(self, given: Any, step: Any) -> None:
        given.query[..., self.spec.kv_lora_rank :] = 0
        super()._decode(given, step)


class KeyBeforeLatent(TorchMLAImpl):
    """The shared key first in each cached row, read as it is written."""

    def _turn(self, cache: torch.Tensor) -> None:
        cache.copy_(cache.roll(self.spec.qk_rope_head_dim, -1))

    def forward(self, query: Any, key: Any, value: Any, kv_cache: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kv_cache is None:
            return super().forward(query, key, value, kv_cache, *args, **kwargs)
        output = super().forward(query, key, value, kv_cache, *args, **kwargs)
        self._turn(kv_cache.key)
        return output


class LseOfBase2(TorchMLAImpl):
    def _decode(self, given: Any, step: Any) -> None:
        super()._decode(given, step)
        if given.lse is not None:
            given.lse.div_(math.log(2))


class MergesPlainly(TorchMLAImpl):
    """Every part weighs the same."""

    def _prefill(self, given: Any, rows: Any, plan: Any) -> None:
        super()._prefill(given, rows, plan)
        if given.lse is not None:
            given.lse.zero_()


class CausalContext(TorchMLAImpl):
    def _prefill(self, given: Any, rows: Any, plan: Any) -> None:
        square = bool((rows.query_starts_cpu == rows.key_starts_cpu).all())
        super()._prefill(given, replace(rows, causal=rows.causal or square), plan)


class NeverCausal(TorchMLAImpl):
    def _prefill(self, given: Any, rows: Any, plan: Any) -> None:
        super()._prefill(given, replace(rows, causal=False), plan)


class ForgetsTheScale(TorchMLAImpl):
    """Context as it is stored."""

    def _gather(self, latent_cache: torch.Tensor, slots: torch.Tensor, room: Any) -> torch.Tensor:
        gathered = super()._gather(latent_cache, slots, room)
        return gathered if room is None else gathered / self.k_scale


class LosesAChunk(TorchMLAImpl):
    def _attend_prefills(self, q: Any, new: Any, cache: Any, step: Any, rows: PrefillRows, *args: Any) -> None:
        fewer = replace(step, prefill_plans=step.prefill_plans[: max(1, len(rows.chunks))])
        super()._attend_prefills(q, new, cache, fewer, replace(rows, chunks=rows.chunks[:-1]), *args)


class SaysThatIdleRowsAreZero(TorchMLAImpl):
    zeroes_idle_rows = True


class SeesOneMore(TorchMLAState):
    """In a verify step each token sees the next one too."""

    def _part(self, spec: MLASpec, rows: DecodeRows, *args: Any) -> Part:
        part = super()._part(spec, rows, *args)
        later = part.bias.roll(-1, 1) if rows.query_len > 1 else part.bias
        return replace(part, bias=torch.where(torch.arange(part.bias.shape[1])[:, None, None] < rows.query_len - 1,
                                              later, part.bias))  # fmt: skip


class WholePages(TorchMLAMetadataBuilder):
    def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        full = -(-common.seq_lens_cpu // common.page_size) * common.page_size
        return super().build(prefix, with_seq_lens(common, full), fast_build)


class KeepsTheFirstPlan(TorchMLAState):
    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Any:
        return held or super().plan_decode(spec, rows, held)


class PlansAnew(TorchMLAState):
    """A fresh plan at replay, which the graph does not read."""

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Any:
        return super().plan_decode(spec, rows, None)


@dataclass(frozen=True)
class Mutation:
    name: str
    backend: Backend
    case: Callable[[Any], object]  # takes an MLAConformance


def whole_pages(kit: Any) -> None:
    kit.test_nan_never_leaks("plain", None)


MUTATIONS = [
    Mutation("scale of q_nope", mutant(UnscaledRoPE), lambda k: k.test_matches_the_reference(DECODE, F32)),
    Mutation("W_UV of another head", mutant(HeadsExchanged), lambda k: k.test_matches_the_reference(DECODE, F32)),
    Mutation("heads split in halves", mutant(SplitsHeadsInHalves), lambda k: k.test_widths_of_heads(40, 16)),
    Mutation("heads split in halves, narrow", mutant(SplitsHeadsInHalves), lambda k: k.test_widths_of_heads(16, 40)),
    Mutation("scale of values", mutant(ScaleOfValues), lambda k: k.test_widths_of_heads(64, 128)),
    Mutation("scale of rows dropped", mutant(ForgetsTheScale), lambda k: k.test_scales_over_float_caches("plain")),
    Mutation("shared key dropped", mutant(NoSharedKey), lambda k: k.test_matches_the_reference(DECODE, F32)),
    Mutation(
        "rows in the other order",
        mutant(KeyBeforeLatent),
        lambda k: k.test_writes_its_slots_and_no_others(None, "NHD"),
    ),
    Mutation("LSE of base 2", mutant(LseOfBase2), lambda k: k.test_matches_the_reference(DECODE, F32)),
    Mutation("chunks of equal weight", mutant(MergesPlainly), lambda k: k.test_context_in_chunks(16, F32)),
    Mutation("context causal", mutant(CausalContext), lambda k: k.check(k.make_spec(), [SQUARE])),
    Mutation("new tokens not causal", mutant(NeverCausal), lambda k: k.test_future_keys("plain")),
    Mutation("a chunk lost", mutant(LosesAChunk), lambda k: k.test_context_in_chunks(16, F32)),
    Mutation(
        "context unscaled", mutant(ForgetsTheScale), lambda k: k.test_chunked_prefill_equals_whole_with_scales(FP8)
    ),
    Mutation("verify sees ahead", mutant(state=SeesOneMore), lambda k: k.test_verify_lengths(3)),
    Mutation("tails of pages read", mutant(builder_cls=WholePages), whole_pages),
    Mutation("idle rows left", mutant(SaysThatIdleRowsAreZero), lambda k: k.test_replays_equal_the_reference("plain")),
    Mutation("plan not filled", mutant(state=KeepsTheFirstPlan), lambda k: k.test_replays_equal_the_reference("plain")),
    Mutation("plan made anew", mutant(state=PlansAnew), lambda k: k.test_replays_equal_the_reference("plain")),
    Mutation(
        "plain layers not refused",
        mutant(reject=classmethod(lambda cls, spec, cache, device: [])),
        lambda k: k.test_layers_of_the_other_kind_are_refused(),
    ),
]


def kit(backend: Backend) -> MLAConformance:
    return type("Kit", (MLAConformance,), {"backend_name": "TORCH_MLA", "backend": backend})()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_fails_on(mutation: Mutation) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        mutation.case(kit(mutation.backend))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_passes_without(mutation: Mutation) -> None:
    mutation.case(kit(TorchMLABackend))
