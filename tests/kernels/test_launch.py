"""Launches that find the compiled kernel by themselves: for what Triton would compile anew they ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")

STREAM = 7


class Kernel:
    """Notes what Triton is asked to launch, and what the kernels that it gave back are."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        self.described: list[tuple[Any, ...]] = []  # launches by way of Triton, which tells hooks about them

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Compiled:
            self.asked.append((grid, given, options))
            return Compiled(self)

        return run


class Compiled:
    function, packed_metadata = 11, (12, 13)

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self.kernel.described.append((grid, given))

    def run(self, x: int, y: int, z: int, *given: Any) -> None:
        assert given[:6] == (STREAM, self.function, self.packed_metadata, None, None, None)
        self.kernel.again.append(((x, y, z), given[6:]))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "current_stream", lambda: STREAM)
    monkeypatch.setattr(launching, "_RUN_TRIED", {launching._TRITON})
    monkeypatch.setattr("attn_backends.kernels.driver.cuda_driver", lambda: None)


def tensor(dtype: torch.dtype = torch.int32, offset: int = 0) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:]


def test_the_first_launch_asks_and_others_do_not() -> None:
    kernel, first, second = Kernel(), tensor(), tensor()
    launching.launch(kernel, 3, (first,), (7,), ((1, 2.5),), 4, descriptors=("descriptor",))
    launching.launch(kernel, 5, (second,), (8,), ((1, 2.5),), 4, descriptors=("another",))
    assert kernel.asked == [((3,), ("descriptor", first, 7, 1, 2.5), {"num_warps": 4})]
    assert kernel.again == [((5, 1, 1), ("another", second.data_ptr(), 8, 1, 2.5))]


def launch_twice(kernel: Kernel) -> None:
    for grid in (3, 5):
        launching.launch(kernel, grid, (tensor(),), (), (), 4)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_launches(name: str) -> None:
    """By Triton, as long as there are any."""
    kernel, hooks = Kernel(), getattr(launching.triton.knobs.runtime, name)
    hooks.add(print)
    try:
        launch_twice(kernel)
    finally:
        hooks.remove(print)
    assert [grid for grid, _ in kernel.described] == [(5, 1, 1)]
    launch_twice(kernel)
    assert [grid for grid, _ in kernel.again] == [(3, 1, 1), (5, 1, 1)]


@pytest.mark.parametrize("hook", [None, print], ids=str)
def test_a_hook_in_place_of_the_chain(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching.triton.knobs.runtime, "launch_enter_hook", hook)
    kernel = Kernel()
    launch_twice(kernel)
    assert bool(kernel.described) == (hook is not None)


def test_a_triton_that_was_not_tried_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_RUN_TRIED", set())
    kernel = Kernel()
    launch_twice(kernel)
    assert [grid for grid, _ in kernel.described] == [(5, 1, 1)]
    assert not kernel.again


@pytest.mark.parametrize(
    "changes",
    [{"tensors": (tensor(torch.int64),)}, {"tensors": (tensor(offset=1),)}, {"groups": ((2,),)}, {"warps": 8},
     {"use_pdl": True}],
    ids=["dtype", "alignment", "number", "warps", "use_pdl"],
)  # fmt: skip
def test_what_is_compiled_anew(changes: dict[str, Any]) -> None:
    kernel, given = Kernel(), {"tensors": (tensor(),), "varying": (), "groups": ((1,),), "warps": 4}
    for arguments in (given, {**given, **changes}) * 2:
        launching.launch(kernel, 1, **arguments)
    assert (len(kernel.asked), len(kernel.again)) == (2, 2)
    assert kernel.asked[0][2] == {"num_warps": 4}
    assert ("launch_pdl" in kernel.asked[1][2]) == ("use_pdl" in changes)


def test_a_grid_of_two_numbers() -> None:
    kernel = Kernel()
    for grid in ((2, 3), (4, 5)):
        launching.launch(kernel, grid, (tensor(),), (), (), 4)
    assert [grid for grid, *_ in kernel.asked + kernel.again] == [(2, 3), (4, 5, 1)]


def test_which_of_several_tensors_is_not_aligned_matters() -> None:
    kernel = Kernel()
    for tensors in ((tensor(), tensor(offset=1)), (tensor(offset=1), tensor())):
        launching.launch(kernel, 1, tensors, (), (), 4)
    assert (len(kernel.asked), len(kernel.again)) == (2, 0)


@pytest.mark.parametrize(
    ("module", "name", "varying"),
    [
        ("backends.triton.kernels.decode", "decode_kernel", ["table_row", "most_short"]),
        ("kernels.prefill.portable_kernel", "prefill_kernel",
         ["first_row", "num_rows", "num_tiles", "section", "table_row"]),
        ("kernels.prefill.hopper_kernel", "prefill_hopper_kernel",
         ["first_row", "num_rows", "section", "table_row", "max_items"]),
        ("kernels.prefill.list_kernel", "list_kernel",
         ["first_row", "num_rows", "max_items", "num_whole", "target", "num_kv_heads", "window_right", "window_left",
          "chunk", "others_tokens", "num_tokens", "num_counters", "tile_tokens", "block_keys", "min_blocks"]),
        ("kernels.equal_cuts", "cut_kernel",
         ["num_rows", "max_cuts", "few_cuts", "long_cut", "heads", "num_sms", "resident", "row_keys", "much_alike",
          "part_keys", "whole_keys", "num_programs", "window_left", "chunk", "most_tokens", "num_counters"]),
        ("backends.mla.triton_mla.decode_kernel", "mla_decode_kernel", ["table_row"]),
        ("backends.mla.triton_mla.decode_hopper_kernel", "mla_hopper_kernel", ["table_row"]),
        ("cache.kernels", "write_kv_kernel", ["k_scale", "v_scale"]),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_kernels_are_not_compiled_for_what_varies(module: str, name: str, varying: list[str]) -> None:
    kernel = getattr(pytest.importorskip(f"attn_backends.{module}"), name)
    first = kernel.arg_names.index(varying[0])
    assert kernel.arg_names[first : first + len(varying)] == varying
    assert set(varying) <= set(kernel.do_not_specialize)


def test_kernels_have_their_own() -> None:
    kernels = Kernel(), Kernel()
    for kernel in kernels:
        launching.launch(kernel, 1, (tensor(),), (), (), 4)
    assert [len(kernel.asked) for kernel in kernels] == [1, 1]


def test_what_is_kept_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_forms", launching._Forms())
    monkeypatch.setattr(launching, "_MOST_COMPILED", 3)
    kernel = Kernel()
    for number in range(10):
        launching.launch(kernel, 1, (tensor(),), (), ((number,),), 4)
    assert len(kernel.asked) == 10
    assert len(launching._forms.found) <= 3
