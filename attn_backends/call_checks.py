"""What impls ask of a call before they run it, and backends of a GPU before they are chosen."""

from __future__ import annotations

import torch

from attn_backends.interface import Rejection, Unsupported
from attn_backends.spec import FP8_DTYPES, AttentionSpec

_FP8_SINCE = (8, 9)  # compute capability


def check_call(
    backend: str, spec: AttentionSpec, query: torch.Tensor, num_tokens: int, output_scale: float | None
) -> None:
    """The query is of this step and layer, and the output is not to be quantised.

    Raises:
        ValueError: the query's shape is not [num_tokens, num_qo_heads, head_dim].
        Unsupported: an output scale is given.
    """
    expected = (num_tokens, spec.num_qo_heads, spec.head_dim)
    if query.shape != expected:
        raise ValueError(f"query has shape {tuple(query.shape)}; this step and layer need {expected}")
    if output_scale is not None:
        raise Unsupported(backend, [Rejection("output_scale", str(output_scale), "None", "Quantise the output.")])


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


def reject_early_fp8(spec: AttentionSpec, device: torch.device | str) -> list[Rejection]:
    """An fp8 cache on a GPU whose instructions do not convert it: Triton would fail to compile at the first step."""
    device = torch.device(device)
    if spec.cache_dtype not in FP8_DTYPES or device.type != "cuda" or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability >= _FP8_SINCE:
        return []
    got, since = (".".join(map(str, pair)) for pair in (capability, _FP8_SINCE))
    asked = f"{spec.cache_dtype} on compute capability {got}"
    return [Rejection("cache_dtype", asked, f"fp8 from {since} on", "Leave cache.dtype out.")]
