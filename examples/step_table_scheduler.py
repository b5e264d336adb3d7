"""A scheduler of your own over `StepTable`: requests come, share steps, and leave, and one layer of TORCH attends.

Each step takes every running request: whole prompts as prefills, one token of the others as decodes. Pages come from a
list of free ones. `python examples/step_table_scheduler.py` prints what each step had.
"""

from collections import deque

import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, StepTable, allocate_kv_cache, get_backend, plan_groups

WAITING = deque([("a", 21, 6), ("b", 5, 3), ("c", 40, 4), ("d", 9, 5)])  # name, prompt tokens, tokens to decode
MOST_RUNNING = 3


def main() -> None:
    spec, pool, limits = AttentionSpec(8, 2, 64), KVCacheSpec(num_pages=10, page_size=16), Limits(MOST_RUNNING, 80, 64)
    backend, groups = get_backend("TORCH"), plan_groups({0: spec})
    builder = backend.get_builder_cls()(groups[0], pool, limits, "cpu")
    state = backend.get_state_cls()(groups, pool, limits, "cpu")
    impl = backend.get_impl_cls()(spec, pool, "cpu")
    kv_cache = allocate_kv_cache(backend, {0: spec}, pool, "cpu").layers[0]
    table, free = StepTable(limits, pool, "cpu"), list(range(pool.num_pages))
    cached: dict[str, int] = {}  # tokens in the cache, by request
    wanted: dict[str, int] = {}  # tokens that a request has in the end
    asked: dict[str, int] = {}  # its new tokens in the next step

    for number in range(100):
        while WAITING and len(cached) < MOST_RUNNING:  # admit: a row in the table, its prompt as new tokens
            name, prompt, decodes = WAITING.popleft()
            table.enter(name, [])
            cached[name], wanted[name], asked[name] = 0, prompt + decodes, prompt
        if not cached:
            break
        for name in cached:  # pages for what is new
            lacking = -(-(cached[name] + asked[name]) // pool.page_size) - len(table.pages_of(name))
            table.extend(name, [free.pop() for _ in range(lacking)])
        table.arrange(list(asked), list(asked.values()))  # decodes in front
        names = table.request_ids
        batch = table.step([cached[name] for name in names], [asked[name] for name in names])

        metadata = builder.build(0, batch.common)  # the same for every layer of the group
        step = state.begin_forward(metadata)  # plans; then every layer of the group takes the step
        query, key, value = (torch.randn(batch.common.num_tokens, heads, 64) for heads in (8, 2, 2))
        output = impl.forward(query, key, value, kv_cache, step)
        has = ", ".join(f"{name} {asked[name]}+{cached[name]}" for name in names)
        print(f"step {number}: {metadata.num_decodes} decodes, {metadata.num_prefills} prefills: {has} "
              f"-> {list(output.shape)}, {len(free)} pages free")  # fmt: skip

        for name in list(cached):
            cached[name], asked[name] = cached[name] + asked[name], 1
            if cached[name] == wanted[name]:  # done: its pages are free, and the last row takes its place
                free.extend(table.pages_of(name).tolist())
                table.leave(name)
                del cached[name], wanted[name], asked[name]


if __name__ == "__main__":
    main()
