"""A decode step's page table out of `req_to_token`: how many bytes are copied, and how long its metadata takes.

Pages of one token are gathered row by row, or read where they are if the rows are neighbours and the host knows it;
larger pages need one column each.

    python -m benchmarks host req_to_token
    python -m benchmarks host req_to_token --rows 64 --tokens 4096
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from attn_backends.adapters.req_to_token.batch import StepRows
from attn_backends.adapters.req_to_token.table import TokenTable
from benchmarks.lib.harness import alternate_ms


def decode_rows(num_rows: int, num_tokens: int, order: torch.Tensor, neighbours: bool) -> StepRows:
    """Rows of one new token each; the longest has `num_tokens`."""
    lens = np.random.default_rng(0).integers(num_tokens // 2, num_tokens + 1, num_rows).astype(np.int32)
    lens[0] = num_tokens
    known = order.tolist() if neighbours else None
    return StepRows(order, torch.from_numpy(lens), lens, np.ones(num_rows, np.int32), num_rows, known)


def copied_bytes(table: TokenTable, rows: StepRows) -> int:
    """Bytes of the step's page table that are not the engine's own."""
    pages = table.self_attention(rows).page_table
    own = pages.untyped_storage().data_ptr() == table.req_to_token.untyped_storage().data_ptr()
    return 0 if own else pages.numel() * pages.itemsize


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    slots = torch.arange(2 * args.rows * args.tokens, dtype=torch.int32).view(2 * args.rows, args.tokens)
    scattered, in_turn = torch.randperm(2 * args.rows)[: args.rows], torch.arange(args.rows) + 3
    cases = {
        f"pages of {page_size}, {'neighbours' if known else 'any rows'}": (
            TokenTable(slots, args.tokens, torch.device("cpu"), page_size),
            decode_rows(args.rows, args.tokens, in_turn if known else scattered, known),
        )
        for page_size, known in ((1, False), (1, True), (16, False), (16, True), (64, False))
    }
    times = alternate_ms({name: lambda case=case: case[0].self_attention(case[1]) for name, case in cases.items()})
    print(f"{args.rows} rows of up to {args.tokens} tokens, {torch.get_num_threads()} threads")
    for name, (table, rows) in cases.items():
        print(f"{name:26} {copied_bytes(table, rows):>12,} bytes copied {times[name]:8.3f} ms")


if __name__ == "__main__":
    main()
