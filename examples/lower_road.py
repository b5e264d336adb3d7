"""The lower road: spec → builder → state → impl on hand-made tensors, as the author of an engine would take it.

Two requests: one step prefills both prompts, then four steps decode a token each. Every step's output is compared with
attention over the same keys laid out contiguously.
"""

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

PROMPT_LENS = {"a": 37, "b": 5}
PAGES = {"a": [4, 0, 3], "b": [2, 1]}  # what a page allocator would hand out: any pages, in any order, ahead of need
NUM_DECODES = 4


def contiguous(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # all [tokens, heads, dim]
    """The answer: the last `len(q)` tokens attend to themselves and all before them."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)


def main() -> None:
    torch.manual_seed(0)
    backend = get_backend("TORCH")
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    place = (KVCacheSpec(num_pages=5, page_size=16), Limits(2, 64, 48), "cpu")  # pool, most of a step, device
    groups = plan_groups({0: spec})  # one layer, so one plan group
    builder = backend.get_builder_cls()(groups[0], *place)
    state = backend.get_state_cls()(groups, *place)
    impl = backend.get_impl_cls()(spec, place[0], "cpu")
    kv_cache = allocate_kv_cache(backend, {0: spec}, place[0], "cpu").layers[0]
    past = {name: (torch.empty(0, 2, 64), torch.empty(0, 2, 64)) for name in PAGES}  # for the answer only

    for step in range(1 + NUM_DECODES):
        rows = {name: SequenceData(len(past[name][0]), 1 if step else PROMPT_LENS[name], PAGES[name]) for name in PAGES}
        metadata = builder.build_from_groups([SequenceGroup(name, (row,)) for name, row in rows.items()])
        lens = [row.query_len for row in rows.values()]
        query, key, value = (torch.randn(sum(lens), heads, 64) for heads in (8, 2, 2))
        output = impl.forward(query, key, value, kv_cache, state.begin_forward(metadata))
        for name, q, k, v, got in zip(PAGES, *(t.split(lens) for t in (query, key, value, output)), strict=True):
            past[name] = (torch.cat([past[name][0], k]), torch.cat([past[name][1], v]))
            error = float((got - contiguous(q, *past[name])).abs().max())
            print(f"step {step}  request {name}  {len(q):2d} new of {len(past[name][0])} keys  max error {error:.1e}")
            assert error < 1e-5, "paged and contiguous attention differ"


if __name__ == "__main__":
    main()
