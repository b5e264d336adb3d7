"""TORCH broken in many ways, each with a case of the kit that must fail on it and passes on the whole TORCH."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attn_backends.interface.capabilities import Rejection
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.cases.features import feature
from tests.helpers.mutants import (
    Backend,
    Common,
    declares,
    mutant,
    other_batch,
    other_forward,
    other_scales,
    other_spec,
    with_seq_lens,
)

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
WINDOW_4097 = load_cases().window[1]


@dataclass(frozen=True)
class Mutation:
    name: str
    backend: Backend
    case: Callable[[Any], object]  # takes a BackendConformance


def wider(by: int) -> Callable[[AttentionSpec], AttentionSpec]:
    return lambda spec: replace(spec, window_left=spec.window_left + by) if spec.window_left >= 0 else spec


def longer_chunks(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, chunk_size=spec.chunk_size + 1) if spec.chunk_size else spec


def rising_alibi(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, alibi_slopes=tuple(-s for s in spec.alibi_slopes)) if spec.alibi_slopes else spec


def next_slot(common: Common) -> Common:
    return replace(common, slot_mapping=torch.where(common.slot_mapping < 0, -1, common.slot_mapping ^ 1))


def padding_is_live(common: Common) -> Common:
    return replace(common, slot_mapping=common.slot_mapping.clamp_min(0), num_new_kv=len(common.slot_mapping))


def one_key_short(common: Common) -> Common:
    return with_seq_lens(common, (common.seq_lens_cpu - 1).clamp_min(1))


def whole_last_page(common: Common) -> Common:
    return with_seq_lens(common, -(-common.seq_lens_cpu // common.page_size) * common.page_size)


def causal_from_the_first_key(common: Common) -> Common:
    """Query i of a chunk sees keys 0 to i: the diagonal of the top left corner, not of the bottom right one."""
    lens = torch.where(common.query_lens_cpu > 1, common.query_lens_cpu, common.seq_lens_cpu)
    return with_seq_lens(common, torch.minimum(lens, common.seq_lens_cpu))


def wrong_kv_heads(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """Query head h reads KV head h % num_kv_heads, not h // group_size."""
    heads = torch.arange(layer.spec.num_qo_heads).view(-1, layer.spec.num_kv_heads).T.reshape(-1)
    output: torch.Tensor = forward(**{**given, "query": given["query"][:, heads], "output": None})
    return output[:, heads.argsort()]


def lse_of_base_2(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    output: torch.Tensor = forward(**given)
    if given.get("lse") is not None:
        given["lse"] /= math.log(2)
    return output


def output_of_its_own(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    return forward(**{**given, "output": None})  # type: ignore[no-any-return]


def scaled_in_place(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    given["query"].mul_(2).div_(2.001)
    return forward(**given)  # type: ignore[no-any-return]


def padded_rows_left_alone(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    output: torch.Tensor = forward(**given)
    idle = given["step"].metadata.num_decode_tokens + given["step"].metadata.num_prefill_tokens
    output[idle:] = 1.0
    return output


def scales_new_keys(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """Multiplies outputs by v_scale where no cache was read as well."""
    output: torch.Tensor = forward(**given)
    return output if given["kv_cache"] is not None else output.mul_(layer.v_scale)


def writes_in_float32(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """What is written to a wider cache went through float32."""
    output: torch.Tensor = forward(**given)
    for cached in given["kv_cache"] or ():
        slots = given["step"].metadata.slot_mapping[: given["step"].metadata.num_new_kv]
        cached.flatten(0, 1)[slots] = cached.flatten(0, 1)[slots].float().to(cached.dtype)
    return output


def reads_the_whole_pool(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """A harmless-looking 0 · x over pages that are not this batch's."""
    output: torch.Tensor = forward(**given)
    return output if given["kv_cache"] is None else output + 0 * given["kv_cache"].value.float().sum().to(output.dtype)


class RoundsItsBias(TorchMetadataBuilder):
    """To the layer's dtype, before it is added to the logits."""

    def build(self, *args: Any, **kwargs: Any) -> TorchMetadata:
        built = super().build(*args, **kwargs)
        rows = tuple(replace(row, bias=self._rounded(row.bias)) for row in built.prefill_rows)
        return replace(built, prefill_rows=rows)

    def _rounded(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self.group.spec.dtype)


class RemembersTheLastBatch(TorchMetadataBuilder):
    """Keeps the page table as long as the batch has the same shape."""

    last: Common | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        if self.last is None or self.last.page_table.shape != common_attn_metadata.page_table.shape:
            self.last = common_attn_metadata
        stale = replace(common_attn_metadata, page_table=self.last.page_table)
        return super().build(common_prefix_len, stale, fast_build)


class ReusesItsMetadata(TorchMetadataBuilder):
    """Writes the next batch's slots over the last one's."""

    slots: torch.Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        new = common_attn_metadata.slot_mapping
        self.slots = new.new_empty(1 << 12) if self.slots is None else self.slots
        self.slots[: len(new)] = new
        stale = replace(common_attn_metadata, slot_mapping=self.slots[: len(new)])
        return super().build(common_prefix_len, stale, fast_build)


class PrefixTwice(TorchMetadataBuilder):
    """Attends the shared prefix once more with each row."""

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        shared = super().build(common_prefix_len, common_attn_metadata, fast_build)
        whole = super().build(0, common_attn_metadata, fast_build)
        return replace(whole, prefix_pages=shared.prefix_pages, common_prefix_len=shared.common_prefix_len)


class SaysAnotherThreshold(TorchMetadataBuilder):
    """Rows of two tokens count as decodes for whoever asks, and not for itself."""

    decode_threshold = 2


class Thawed(TorchMetadata):
    __setattr__ = object.__setattr__  # type: ignore[assignment]


class BuildsThawed(TorchMetadataBuilder):
    def build(self, *args: Any, **kwargs: Any) -> TorchMetadata:
        return Thawed(**vars(super().build(*args, **kwargs)))


LESS = declares(soft_cap=False)
SERVES_ALL = classmethod(lambda cls, spec, cache, device: [])


def refusing_64_in(*dtypes: torch.dtype) -> Backend:
    """Refuses a head dim that it declares, in some dtypes."""

    def reject(cls: Any, spec: AttentionSpec, cache: Any, device: Any) -> list[Rejection]:
        is_refused = spec.head_dim == 64 and spec.dtype in dtypes
        return [Rejection("head_dim", "64", "others", "Use float32.")] if is_refused else []

    return mutant(reject=classmethod(reject))


MUTATIONS = [
    Mutation("window one key too wide", other_spec(wider(1)), lambda k: k.test_window_edges(15)),
    Mutation("window one key too narrow", other_spec(wider(-1)), lambda k: k.test_window_edges(16)),
    Mutation("window of 4096 keys one too wide", other_spec(wider(1)), lambda k: k.test_long_window_edges(WINDOW_4097)),
    Mutation(
        "window dropped", other_spec(lambda s: replace(s, window_left=-1)), lambda k: k.test_features("gemma2", F32)
    ),
    Mutation(
        "soft cap dropped",
        other_spec(lambda s: replace(s, logits_soft_cap=None)),
        lambda k: k.test_features("soft_cap", F32),
    ),
    Mutation("sinks dropped", other_spec(lambda s: replace(s, sinks=False)), lambda k: k.test_features("sinks", F32)),
    Mutation(
        "scale ignored",
        other_spec(lambda s: replace(s, scale=s.head_dim**-0.5)),
        lambda k: k.test_features("scale", F32),
    ),
    Mutation(
        "alibi dropped", other_spec(lambda s: replace(s, alibi_slopes=None)), lambda k: k.test_features("alibi", F32)
    ),
    Mutation("alibi of the wrong sign", other_spec(rising_alibi), lambda k: k.test_features("alibi", F32)),
    Mutation("alibi rounded to float16", mutant(RoundsItsBias), lambda k: k.test_alibi_of_keys_ahead(F16)),
    Mutation("alibi rounded to bfloat16", mutant(RoundsItsBias), lambda k: k.test_alibi_of_keys_ahead(BF16)),
    Mutation("chunk edge off by one", other_spec(longer_chunks), lambda k: k.test_chunk_edges(16)),
    Mutation("not causal", other_spec(lambda s: replace(s, causal=False)), lambda k: k.test_future_keys("plain")),
    Mutation(
        "causal although it should not be",
        other_spec(lambda s: replace(s, causal=True)),
        lambda k: k.test_features("non_causal", F32),
    ),
    Mutation(
        "causal shift under chunking",
        other_batch(causal_from_the_first_key),
        lambda k: k.test_chunked_prefill_equals_whole("plain"),
    ),
    Mutation("last page one key short", other_batch(one_key_short), lambda k: k.test_page_sizes_and_layouts(16, "NHD")),
    Mutation(
        "tail of the last page read", other_batch(whole_last_page), lambda k: k.test_nan_never_leaks("plain", None)
    ),
    Mutation(
        "tail of the last page read, finite",
        other_batch(whole_last_page),
        lambda k: k.test_matches_the_reference("small_decode", F32),
    ),
    Mutation("wrong slot", other_batch(next_slot), lambda k: k.test_writes_its_slots_and_no_others(None, "NHD")),
    Mutation(
        "wrong slot, read back", other_batch(next_slot), lambda k: k.test_matches_the_reference("small_decode", F32)
    ),
    Mutation("padding written", other_batch(padding_is_live), lambda k: k.test_padded_rows_are_zero("mixed_small", 5)),
    Mutation("k_scale ignored", other_scales(lambda k, v: (1.0, v)), lambda k: k.test_cache_dtypes(FP8, "NHD", F32)),
    Mutation("v_scale ignored", other_scales(lambda k, v: (k, 1.0)), lambda k: k.test_cache_dtypes(FP8, "HND", F32)),
    Mutation(
        "k_scale and v_scale exchanged",
        other_scales(lambda k, v: (v, k)),
        lambda k: k.test_cache_dtypes(FP8, "NHD", F32),
    ),
    Mutation(
        "float64 caches written in float32",
        other_forward(writes_in_float32),
        lambda k: k.test_cache_dtypes(torch.float64, "NHD", F16),
    ),
    Mutation(
        "k_scale rounded to torch's default dtype",
        other_scales(lambda k, v: (torch.tensor(k, device="cpu").item(), v)),
        lambda k: k.test_defaults_of_torch("plain", BF16),
    ),
    Mutation(
        "k_scale of float caches ignored",
        other_scales(lambda k, v: (1.0, v)),
        lambda k: k.test_scales_over_float_caches("window_15"),
    ),
    Mutation(
        "v_scale of float caches ignored",
        other_scales(lambda k, v: (k, 1.0)),
        lambda k: k.test_scales_with_a_shared_prefix("sinks"),
    ),
    Mutation(
        "scales for keys without a cache",
        other_forward(scales_new_keys),
        lambda k: k.test_scales_are_of_the_cache_alone(feature("plain")),
    ),
    Mutation(
        "wrong KV head of a group",
        other_forward(wrong_kv_heads),
        lambda k: k.test_matches_the_reference("mixed_small", F32),
    ),
    Mutation(
        "LSE of base 2", other_forward(lse_of_base_2), lambda k: k.test_matches_the_reference("small_decode", F32)
    ),
    Mutation(
        "output not written in place", other_forward(output_of_its_own), lambda k: k.test_output_is_written_in_place(0)
    ),
    Mutation("query changed", other_forward(scaled_in_place), lambda k: k.test_inputs_are_not_changed("mixed_small")),
    Mutation(
        "padded rows not zeroed",
        other_forward(padded_rows_left_alone),
        lambda k: k.test_padded_rows_are_zero("small_decode", 1),
    ),
    Mutation(
        "0 · NaN of other pages", other_forward(reads_the_whole_pool), lambda k: k.test_nan_never_leaks("plain", None)
    ),
    Mutation(
        "builder remembers the last pages",
        mutant(RemembersTheLastBatch),
        lambda k: k.test_same_shape_with_other_pages(),
    ),
    Mutation("builder writes over its metadata", mutant(ReusesItsMetadata), lambda k: k.test_builder_is_pure()),
    Mutation("shared prefix counted twice", mutant(PrefixTwice), lambda k: k.test_shared_prefix("plain", True)),
    Mutation(
        "metadata can be changed",
        mutant(BuildsThawed, metadata_cls=Thawed),
        lambda k: k.test_metadata_and_step_are_frozen(),
    ),
    Mutation(
        "another decode threshold",
        mutant(SaysAnotherThreshold),
        lambda k: k.test_decodes_are_what_the_builder_says(),
    ),
    Mutation(
        "gap not refused", mutant(capabilities=LESS, reject=SERVES_ALL), lambda k: k.test_features("soft_cap", F32)
    ),
    Mutation("head dim refused in 16 bits", refusing_64_in(F16, BF16), lambda k: k.test_head_dims(64, F16)),
    Mutation("head dim refused in all", refusing_64_in(F32, F16, BF16), lambda k: k.test_head_dims(64, F32)),
    Mutation("lse not declared, and given", mutant(capabilities=declares(lse=False)), lambda k: k.test_lse()),
]
