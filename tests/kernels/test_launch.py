"""Launches that find the compiled kernel by themselves: for what Triton would compile anew they ask it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")

STREAM = 7
GPUS = [torch.device("cuda", number) for number in range(4)]


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
         ["first_row", "num_rows", "num_tiles", "section", "table_row", "table_width"]),
        ("kernels.prefill.hopper_kernel", "prefill_hopper_kernel",
         ["first_row", "num_rows", "section", "table_row", "max_items"]),
        ("kernels.prefill.list_kernel", "list_kernel",
         ["first_row", "num_rows", "max_items", "num_whole", "target", "num_kv_heads", "window_right", "window_left",
          "chunk", "others_tokens", "num_tokens", "num_counters", "tile_tokens", "tile_queries",
          "group_size", "block_keys", "min_blocks"]),
        ("kernels.equal_cuts", "cut_kernel",
         ["num_rows", "max_cuts", "few_cuts", "long_cut", "heads", "num_sms", "resident", "row_keys", "much_alike",
          "part_keys", "whole_keys", "halves", "num_programs", "window_left", "chunk", "most_tokens", "num_counters"]),
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


def test_each_gpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton has loaded onto one runs on no other."""
    kernel = Kernel()
    for gpu in (0, 1, 0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, gpu=gpu: gpu)
        launching.launch(kernel, 1, (tensor(),), (), (), 4)
    assert (len(kernel.asked), len(kernel.again)) == (2, 2)


def test_what_is_kept_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_forms", launching._Forms())
    monkeypatch.setattr(launching, "_MOST_COMPILED", 3)
    kernel = Kernel()
    for number in range(10):
        launching.launch(kernel, 1, (tensor(),), (), ((number,),), 4)
    assert len(kernel.asked) == 10
    assert len(launching._forms.found) <= 3


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four, of which the third is the current one, with a capability and multiprocessors by their numbers."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: ((7, 5), (8, 0), (9, 0), (10, 0))[gpu.index])
    monkeypatch.setattr(launching.machine, "num_multiprocessors", lambda gpu: 100 + gpu.index)
    monkeypatch.setattr(launching, "_GLUON_TRIED", {launching._TRITON})
    for name in ("_capability", "_multiprocessors"):
        monkeypatch.setattr(launching, name, functools.cache(getattr(launching, name).__wrapped__))


@pytest.mark.usefixtures("gpus")
def test_a_gpu_is_asked_by_its_number_and_without_one_the_current_one() -> None:
    assert [launching.num_multiprocessors(gpu) for gpu in GPUS] == [100, 101, 102, 103]
    assert launching.num_multiprocessors(torch.device("cuda")) == 102


@pytest.mark.usefixtures("gpus")
def test_which_gpus_have_which_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours since Ampere, those for Hopper there alone, and none of AMD's."""
    assert [launching.runs_kernels(gpu) for gpu in GPUS] == [False, True, True, True]
    assert [launching.has_hopper_kernels(gpu) for gpu in GPUS] == [False, False, True, False]
    assert [launching.has_tensor_engine(gpu) for gpu in GPUS] == [False, False, True, True]
    assert [launching.supports_pdl(gpu) for gpu in GPUS] == [False, False, True, True]
    monkeypatch.setattr(launching, "is_hip", lambda: True)
    for ask in (launching.runs_kernels, launching.has_hopper_kernels, launching.has_tensor_engine):
        assert not any(map(ask, GPUS))


def test_a_cpu_runs_no_kernels_but_to_list_them() -> None:
    cpu = torch.device("cpu")
    assert not launching.runs_kernels(cpu)
    assert not launching.supports_pdl(cpu)
    assert not launching.has_hopper_kernels(cpu)
    token = launching.LISTING.set(SimpleNamespace(machine=launching.Machine(7, 9, True, True, True)))
    try:
        assert launching.runs_kernels(cpu)
        assert launching.machine_of(cpu) == launching.Machine(7, 9, True, True, True)
    finally:
        launching.LISTING.reset(token)
