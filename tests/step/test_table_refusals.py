"""What a step table refuses: the message names the request and the numbers, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_backends.step.table import StepTable
from tests.helpers.step_walk import SIDES, assert_step, compiled, table_of_three


@pytest.fixture(params=SIDES)
def table(request: pytest.FixtureRequest) -> StepTable:
    return table_of_three(request.param)


REFUSED: dict[str, tuple[Callable[[StepTable], object], str]] = {
    "page too large": (lambda t: t.extend("a", [48]), r"request 'a': page id 48 is not one of 0 to 47"),
    "page negative": (lambda t: t.enter("d", [2, -1]), r"request 'd': page id -1 is not one of 0 to 47"),
    "page there": (lambda t: t.extend("a", [6, 40]), r"request 'a' would have page 40 twice"),
    "page twice": (lambda t: t.enter("d", [6, 7, 6]), r"request 'd' would have page 6 twice"),
    "page no number": (lambda t: t.extend("a", [1.5]), r"request 'a': page id 1.5 is no 32-bit integer"),
    "page huge": (lambda t: t.extend("a", [1 << 40]), r"request 'a': page id 1099511627776 is no 32-bit integer"),
    "pages of a matrix": (lambda t: t.extend("a", [[1]]), r"request 'a': page id: got an array of shape \[1, 1\]"),
    "too many pages": (
        lambda t: t.extend("a", range(11, 21)),
        r"request 'a' would have 13 pages of 4 slots; max_model_len is 46, which 12 pages hold",
    ),
    "append: page too large": (lambda t: t.append([0, 1], [9, 48]), r"request 'b': page id 48 is not one of 0 to 47"),
    "append: page negative": (lambda t: t.append([0, 1], [-8, 9]), r"request 'a': page id -8 is not one of 0 to 47"),
    "append: page there": (lambda t: t.append([0, 1], [9, 10]), r"request 'b' would have page 10 twice"),
    "append: no such row": (lambda t: t.append([0, 3], [9, 9]), r"row 3 is not one of rows 0 to 2"),
    "append: row negative": (lambda t: t.append([-1], [9]), r"row -1 is not one of rows 0 to 2"),
    "append: row twice": (lambda t: t.append([2, 1, 2], [9, 11, 12]), r"request 'c' \(row 2\) is named twice"),
    "append: counts": (lambda t: t.append([0, 1], [9]), r"2 rows and 1 pages"),
    "append: full": (
        lambda t: [t.append([0], [page]) for page in range(11, 21)],
        r"request 'a' would have 13 pages of 4 slots; max_model_len is 46",
    ),
    "known": (lambda t: t.enter("b", [9]), r"request 'b' has row 1 already"),
    "unknown": (lambda t: t.leave("z"), r"request 'z' has no row"),
    "too many requests": (
        lambda t: [t.enter(str(i), []) for i in range(5)],
        r"request '4' would be number 8, and max_num_requests is 7",
    ),
    "swap": (lambda t: t.swap_rows(0, 3), r"rows 0 and 3 are not both among rows 0 to 2"),
    "arrange: unknown": (lambda t: t.arrange(["b", "z"], [1, 1]), r"request 'z' has no row"),
    "arrange: twice": (lambda t: t.arrange(["b", "b"], [1, 1]), r"request 'b' \(row 1\) is named twice"),
    "arrange: counts": (lambda t: t.arrange(["b"], [1, 1]), r"1 requests and 2 query lengths"),
    "query of zero": (lambda t: t.step([11, 7], [1, 0]), r"'b' \(row 1\) has context length 7 and query length 0"),
    "query negative": (lambda t: t.step([11, 7], [1, -2]), r"'b' \(row 1\) has context length 7 and query length -2"),
    "context negative": (lambda t: t.step([-1], [1]), r"'a' \(row 0\) has context length -1 and query length 1"),
    "context negative, chunk": (lambda t: t.step([-1], [4]), r"'a' \(row 0\) has context length -1 and query length 4"),
    "context huge": (lambda t: t.step([1 << 31], [1]), r"'a': context length 2147483648 is no 32-bit integer"),
    "query huge": (lambda t: t.step([1, 1], [1, 1 << 31]), r"'b': query length 2147483648 is no 32-bit integer"),
    "sum overflows": (lambda t: t.step([9], [2**31 - 1]), r"'a' \(row 0\) would have 2147483656 tokens"),
    "beyond the pages": (
        lambda t: t.step([11, 8], [1, 1]),
        r"'b' \(row 1\) has 2 pages of 4 slots, which hold 8 keys, but its length is 9",
    ),
    "beyond the model": (
        lambda t: (t.extend("a", range(11, 20)), t.step([46], [1])),
        r"'a' \(row 0\) would have 47 tokens; max_model_len is 46",
    ),
    "more rows than requests": (lambda t: t.step([1] * 4, [1] * 4), r"4 context lengths and 4 query lengths for 3"),
    "no rows": (lambda t: t.step([], []), r"0 context lengths and 0 query lengths for 3 rows"),
    "unequal": (lambda t: t.step([1, 2], [1]), r"2 context lengths and 1 query lengths for 3 rows"),
    "too many padded requests": (
        lambda t: t.step([1], [1], num_padded_reqs=7),
        r"8 requests and 8 tokens, 7 padded .*'a'.*max_num_requests 7 and max_num_tokens 40",
    ),
    "too many tokens": (
        lambda t: t.step([0, 0, 0], [12, 8, 20], num_padded_reqs=1),
        r"4 requests and 41 tokens, 1 padded",
    ),
    "padding negative": (lambda t: t.step([1], [1], num_padded_reqs=-1), r"num_padded_reqs is -1"),
    "padding of nothing": (lambda t: t.step([1], [1], num_padded_reqs=1, padded_query_len=0), r"padded_query_len 0"),
    "token ids": (lambda t: t.step([1], [2], [5]), r"token_ids has shape \[1\]; the step has 2 tokens"),
    "lengths on the device": (
        lambda t: t.step([1], [1], context_lens_on_device=torch.tensor([1])),
        r"context_lens_on_device is torch.int64 \[1\] on cpu; it must be torch.int32 \[1\] on cpu",
    ),
}


def state_of(table: StepTable) -> list[object]:
    buffers = table.side.buffers
    tensors = [value for value in vars(buffers).values() if isinstance(value, torch.Tensor)]
    rows = [table.pages_of(name).tolist() for name in table.request_ids]
    return [list(table.request_ids), rows, table.num_sent.tolist(), *(tensor.tolist() for tensor in tensors)]


@pytest.mark.parametrize("refused", REFUSED)
def test_refusals(table: StepTable, refused: str) -> None:
    edit, message = REFUSED[refused]
    table.step([4, 2, 3], [1, 2, 4], list(range(7)), num_padded_reqs=1)
    before = state_of(table)
    with pytest.raises(ValueError, match=message):
        edit(table)
    if refused not in ("append: full", "too many requests", "beyond the model"):  # those that change something first
        assert state_of(table) == before
    step = table.step([4, 2, 3], [1, 2, 4])
    assert_step(step, compiled(table, [4, 2, 3], [1, 2, 4]))


def test_what_cannot_be_advanced(table: StepTable) -> None:
    old = table.step([9, 6], [1, 1])
    step = table.step([9, 6], [1, 1])
    with pytest.raises(ValueError, match="only the last step can be advanced"):
        table.advance(old)
    last = table.advance(step)
    before = state_of(table)
    with pytest.raises(ValueError, match=r"'b' \(row 1\) has 2 pages of 4 slots, which hold 8 keys, .* is 9"):
        table.advance(last)
    assert state_of(table) == before
    table.append([1], [33])  # it travels along
    assert_step(table.advance(last), compiled(table, [11, 8], [1, 1]))


@pytest.mark.parametrize("move", [lambda table: table.swap_rows(0, 2), lambda table: table.leave("c")])
def test_no_advance_once_rows_have_moved(table: StepTable, move: Callable[[StepTable], object]) -> None:
    step = table.step([10, 6, 3], [1, 1, 1])
    move(table)
    with pytest.raises(ValueError, match="not once rows have moved"):
        table.advance(step)
