"""What impls ask of a call before they run it, and backends of a GPU before they are chosen."""

from __future__ import annotations

import torch

from attn_backends.capabilities import Rejection, Unsupported
from attn_backends.devices import compute_capability
from attn_backends.kv_cache import KVCache
from attn_backends.mla_spec import MLASpec
from attn_backends.spec import FP8_DTYPES, AttentionSpec

_FP8_SINCE = (8, 9)  # compute capability


def check_call(
    backend: str,
    spec: AttentionSpec,
    num_tokens: int,
    query: torch.Tensor,
    kv_cache: KVCache | None,
    output: torch.Tensor | None,
    lse: torch.Tensor | None,
    output_scale: float | None,
) -> None:
    """A call's tensors are of this step and layer, and lie as every kernel can take them; the output is not to be
    quantised.

    Raises:
        ValueError: the query's shape is not [num_tokens, num_qo_heads, head_dim], or the output's not [num_tokens,
            num_qo_heads, head_dim_vo], or the LSE's not [num_tokens, num_qo_heads]; another dtype; the last dimension
            of one, or of the cache, does not lie together, or the LSE is not contiguous.
        Unsupported: an output scale is given.
    """
    heads = (num_tokens, spec.num_qo_heads)
    _check_tensor("query", query, (*heads, spec.head_dim), spec.dtype)
    if output is not None:
        _check_tensor("output", output, (*heads, spec.head_dim_vo), spec.dtype)
    if lse is not None:
        _check_tensor("lse", lse, heads, torch.float32)
        if not lse.is_contiguous():
            raise ValueError(f"lse has strides {lse.stride()}; it must be contiguous: pass a tensor of its own")
    for name, cached in () if kv_cache is None else zip(kv_cache._fields, kv_cache, strict=True):
        if cached.stride(-1) != 1 and cached.shape[-1] > 1:
            raise ValueError(
                f"kv_cache.{name} has strides {cached.stride()}; a slot's head_dim must lie together (a last stride of "
                "1): make the pool with allocate_kv_cache"
            )
    if output_scale is not None:
        raise Unsupported(backend, [Rejection("output_scale", str(output_scale), "None", "Quantise the output.")])


def check_new_kv(spec: AttentionSpec, num_new_kv: int, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
    """What a call brings to the cache is what the step expects: both or none, and a row for each new token at least.

    Raises:
        ValueError: it is not; says what is.
    """
    if key is None and value is None:
        return
    rows: tuple[tuple[int, ...], ...] = ((spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim_vo))
    if isinstance(spec, MLASpec):
        rows = ((spec.kv_lora_rank,), (spec.qk_rope_head_dim,))
    for (name, tensor), row in zip((("key", key), ("value", value)), rows, strict=True):
        if tensor is None or tensor.shape[1:] != row or tensor.shape[0] < num_new_kv:
            got = "not given" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"{name} is {got}; this step brings {num_new_kv} tokens of {row} each: pass both key and value, a row "
                "for every one of them"
            )


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} in {tensor.dtype}; this step and layer need {shape} in {dtype}"
        )
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must lie together (a last stride of 1): pass "
            f"{name}.contiguous()"
        )


def check_planned_for(planned: AttentionSpec, spec: AttentionSpec) -> None:
    """A step was planned for layers like this one.

    Raises:
        ValueError: it was not; says what differs.
    """
    if planned is not spec and planned != spec:
        differs = [name for name, value in vars(spec).items() if getattr(planned, name) != value]
        raise ValueError(
            f"this step was planned for layers that differ from this one in {', '.join(differs)}: give the layer "
            "the step of its own plan group"
        )


def reject_newer_gpu(device: torch.device | str, newest: int, supported: str, hint: str) -> list[Rejection]:
    """A GPU whose compute capability has a larger first number than `newest`."""
    capability = compute_capability(device)
    if capability is None or capability[0] <= newest:
        return []
    return [Rejection("compute_capability", ".".join(map(str, capability)), supported, hint)]


def reject_early_fp8(spec: AttentionSpec, device: torch.device | str) -> list[Rejection]:
    """An fp8 cache on a GPU whose instructions do not convert it: Triton would fail to compile at the first step."""
    capability = compute_capability(device)
    if spec.cache_dtype not in FP8_DTYPES or capability is None or capability >= _FP8_SINCE:
        return []
    got, since = (".".join(map(str, pair)) for pair in (capability, _FP8_SINCE))
    asked = f"{spec.cache_dtype} on compute capability {got}"
    return [Rejection("cache_dtype", asked, f"fp8 from {since} on", "Leave cache.dtype out.")]
