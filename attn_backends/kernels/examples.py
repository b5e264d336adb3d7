"""Tensors without memory that lie as engines bring them, to list launches with (see `variants`).

Triton compiles a kernel anew for strides that are 1, multiples of 16 or neither, and for addresses that are multiples
of 16 bytes or not. With a head dim that is a multiple of 16 all of the layouts below are one to it. Tensors that lie
otherwise, such as rows that are padded to an odd number, have their kernels compiled when they first come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch

from attn_backends.kernels.launch import power_of_two
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, MLASpec

NUM_TOKENS = (1, 2, 3)  # one token, which may start early; and both parities, which strides of heads can show
PAGES = 2

TensorsT = TypeVar("TensorsT", bound=Sequence[Any])


class NewTokens(NamedTuple):
    """The tensors that a step brings, on `meta`."""

    query: torch.Tensor  # [num_tokens, num_qo_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_dim_vo]


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def new_tokens(spec: AttentionSpec) -> list[NewTokens]:
    """Each of queries with keys, and of values: side by side in one tensor, on their own, or head by head."""
    found = []
    for num_tokens in NUM_TOKENS:
        # Keys of cross attention are others than the queries' own.
        for num_keys in NUM_TOKENS if spec.attention_type is AttentionType.CROSS else (num_tokens,):
            for make, make_value in product((_packed, _apart, _by_head), repeat=2):
                key = make(spec, num_keys).key
                found.append(NewTokens(make(spec, num_tokens).query, key, make_value(spec, num_keys).value))
    return found


def _apart(spec: AttentionSpec, num_tokens: int) -> NewTokens:
    return NewTokens(*(empty(num_tokens, *size, dtype=spec.dtype) for size in _sizes(spec)))


def _by_head(spec: AttentionSpec, num_tokens: int) -> NewTokens:
    sizes = _sizes(spec)
    return NewTokens(*(empty(heads, num_tokens, dim, dtype=spec.dtype).transpose(0, 1) for heads, dim in sizes))


def _packed(spec: AttentionSpec, num_tokens: int) -> NewTokens:
    sizes = _sizes(spec)
    columns = [heads * dim for heads, dim in sizes]
    columns_of_each = empty(num_tokens, sum(columns), dtype=spec.dtype).split(columns, 1)
    return NewTokens(*(part.unflatten(1, size) for part, size in zip(columns_of_each, sizes, strict=True)))


def _sizes(spec: AttentionSpec) -> Sequence[tuple[int, int]]:
    heads = spec.num_kv_heads
    return (spec.num_qo_heads, spec.head_dim), (heads, spec.head_dim), (heads, spec.head_dim_vo)


def new_latents(spec: MLASpec) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Latent rows and rope keys of new tokens, as `write_latent` gives them on: each on its own, or side by side."""
    found = []
    for num_tokens, is_packed, is_packed_rope in product(NUM_TOKENS, (False, True), (False, True)):
        sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        apart = tuple(empty(num_tokens, size, dtype=spec.dtype) for size in sizes)
        packed = empty(num_tokens, spec.latent_dim, dtype=spec.dtype).split(sizes, 1)
        found.append(((packed if is_packed else apart)[0][:, None], (packed if is_packed_rope else apart)[1][:, None]))
    return found


def caches(spec: AttentionSpec, cache: KVCacheSpec) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A pool's keys and values, [num_pages, page_size, num_kv_heads, dim] each: two tensors, or halves of one. Those of
    MLA are parts of a row."""
    if isinstance(spec, MLASpec):
        latents = empty(PAGES, cache.page_size, 1, spec.latent_dim, dtype=spec.cache_dtype)
        yield latents[..., : spec.kv_lora_rank], latents[..., spec.kv_lora_rank :]
        return
    heads, dims = spec.num_kv_heads, (spec.head_dim, spec.head_dim_vo)
    page = (cache.page_size, heads) if cache.layout == "NHD" else (heads, cache.page_size)
    key, value = (empty(PAGES, *page, dim, dtype=spec.cache_dtype) for dim in dims)
    yield _as_slots(key, cache), _as_slots(value, cache)
    if dims[0] == dims[1]:
        key, value = empty(PAGES, 2, *page, dims[0], dtype=spec.cache_dtype).unbind(1)
        yield _as_slots(key, cache), _as_slots(value, cache)


def _as_slots(tensor: torch.Tensor, cache: KVCacheSpec) -> torch.Tensor:
    return tensor if cache.layout == "NHD" else tensor.transpose(1, 2)


def powers_of_two(most: int) -> list[int]:
    """Powers of two up to the first that is not below `most`."""
    return [1 << bits for bits in range(power_of_two(most).bit_length())]


def distinct(given: Iterable[TensorsT]) -> list[TensorsT]:
    """One of each kind that Triton, or a launch for one token, could tell from the others."""
    return list({tuple(map(_lies, tensors)): tensors for tensors in given}.values())


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    strides = [(stride == 1, stride % 16 == 0) for stride in tensor.stride()[:-1]]
    return tensor.shape[0] == 1, tensor.data_ptr() % 16 == 0, *strides
