"""TORCH decode through the paged cache against `scaled_dot_product_attention` on contiguous keys of the same work.

Contiguous SDPA reads ready keys and gathers nothing: it is the floor. The query heads of one KV head are folded into
its query length, as TORCH does, so that the two differ by the paging alone. TORCH decodes by its kernel in C where
there is a compiler; without it, gathering all rows together and in pieces are both timed: `gather_together_bytes`
chooses between them.

    python -m benchmarks rules torch_decode
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attn_backends import (
    AttentionSpec,
    KVCacheSpec,
    Limits,
    SequenceData,
    SequenceGroup,
    allocate_kv_cache,
    get_backend,
    plan_groups,
)
from attn_backends.registry import validate_options
from benchmarks.lib.harness import alternate_ms, report

SHAPES = [  # requests, context, query heads, KV heads, head dim
    (8, 1024, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (16, 128, 9, 3, 64),
    (16, 512, 9, 3, 64),
    (64, 256, 9, 3, 64),
]
PAGE_SIZE = 16


@torch.inference_mode()
def measure(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> dict[str, object]:
    """Times of one shape, after checking that both roads agree."""
    batch, context, num_qo_heads, num_kv_heads, head_dim = shape
    spec = AttentionSpec(num_qo_heads, num_kv_heads, head_dim, dtype=dtype)
    cache = KVCacheSpec(batch * context // PAGE_SIZE, PAGE_SIZE)
    limits = Limits(batch, batch, context)
    backend = get_backend("TORCH")
    group = plan_groups({0: spec})[0]
    kv = allocate_kv_cache(backend, {0: spec}, cache, "cpu").layers[0]
    for tensor in kv:
        tensor.copy_(torch.randn(tensor.shape))
    pages = torch.randperm(cache.num_pages).int().view(batch, -1)
    groups = [SequenceGroup(str(i), (SequenceData(context - 1, 1, pages[i].numpy()),)) for i in range(batch)]
    query = torch.randn(batch, num_qo_heads, head_dim).to(dtype)
    key, value = (torch.randn(batch, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    output = torch.empty_like(query)

    def paged(**changes: object):  # type: ignore[no-untyped-def]
        options = validate_options("TORCH", changes)
        impl = backend.get_impl_cls()(spec, cache, "cpu", options=options)
        builder = backend.get_builder_cls()(group, cache, limits, "cpu", options=options)
        state = backend.get_state_cls()([group], cache, limits, "cpu", options=options)
        step = state.begin_forward(builder.build_from_groups(groups))
        return lambda: impl.forward(query, key, value, kv, step, output)

    paged()()
    keys, values = (
        tensor[pages.long()].view(batch, context, num_kv_heads, head_dim).transpose(1, 2).contiguous() for tensor in kv
    )
    folded = query.view(batch, num_kv_heads, -1, head_dim)
    contiguous = F.scaled_dot_product_attention(folded, keys, values)
    error = (output - contiguous.view_as(output)).norm() / output.norm()
    assert error < (1e-5 if dtype is torch.float32 else 2e-2), error
    times = alternate_ms(
        {
            "contiguous": lambda: F.scaled_dot_product_attention(folded, keys, values),
            "default": paged(),
            "together": paged(native_decode=False, gather_together_bytes=1 << 27),
            "in pieces": paged(native_decode=False, gather_together_bytes=0),
        }
    )
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "B x L, heads, dim": f"{batch} x {context}, {num_qo_heads}/{num_kv_heads}, {head_dim}",
        "contiguous SDPA ms": times["contiguous"],
        "TORCH ms": times["default"],
        "together ms": times["together"],
        "in pieces ms": times["in pieces"],
        "TORCH / SDPA": times["default"] / times["contiguous"],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    rows = [measure(shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    report("torch_decode", "TORCH paged decode against contiguous SDPA", rows)
