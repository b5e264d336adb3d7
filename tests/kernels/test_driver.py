"""Launches by CUDA's driver itself: each argument is where the driver reads it, and what cannot be so is Triton's."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, MLASpec, plan_groups

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
driving = pytest.importorskip("attn_backends.kernels.driver")
without_gpu = pytest.importorskip("benchmarks.lib.without_gpu")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")


class Kernel:
    """What `launch` asks of one of Triton's: its parameters are two descriptors, tensors and numbers."""

    def __init__(self, stand_in: Any, *parameters: str) -> None:
        self.stand_in, self.__name__ = stand_in, "kernel"
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper(), do_not_specialize=name.startswith("varying"))
            for name in parameters
        ]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **options: self.stand_in.compile(self, given, options)


@pytest.fixture
def driver() -> Iterator[Any]:
    with without_gpu.kernels_without_a_gpu(keeps=True) as stand_in:
        yield stand_in


def tensor() -> torch.Tensor:
    return torch.zeros(64, 64, dtype=torch.bfloat16)


def described(of: torch.Tensor, rows: int = 64) -> Any:
    return SimpleNamespace(base=of, shape=[rows, 64], strides=[64, 1], block_shape=[16, 64])


def pointer(of: torch.Tensor) -> bytes:
    return of.data_ptr().to_bytes(8, "little")


def number(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


NONE = bytes(8), bytes(8)  # the scratch memory that no kernel of ours has
PARAMETERS = ("first", "second", "varying_count", "varying_scale", "stride", "one", "half", "BLOCK")


def launch(kernel: Any, tensors: tuple[torch.Tensor, ...], varying: tuple[float, ...], grid: Any = 3) -> None:
    launching.launch(kernel, grid, tensors, varying, ((70, 1, 0.5, 16),), 4, use_pdl=True)


def test_arguments_are_those_of_this_launch(driver: Any) -> None:
    """Numbers that are 1, and constants, are none: Triton compiles for them."""
    kernel, tensors = Kernel(driver, *PARAMETERS), (tensor(), tensor())
    launch(kernel, (tensor(), tensor()), (5, 1.0))
    launch(kernel, tensors, (-7, 0.25), (2, 3))
    (started,) = driver.launches
    assert started[:5] == ("kernel", (2, 3, 1), 4, True, without_gpu.STREAM)
    half, quarter = struct.pack("<f", 0.5), struct.pack("<f", 0.25)
    assert started.arguments == (*map(pointer, tensors), number(-7), quarter, number(70), half, *NONE)


def test_descriptors_are_of_this_launchs_tensors(driver: Any) -> None:
    kernel = Kernel(driver, "key_desc", "value_desc", "query", "BLOCK")
    tensors = [tensor() for _ in range(4)]
    for of, rows in ((tensors[0], 64), (tensors[1], 64), (tensors[2], 32), (tensors[3], 32)):
        launching.launch(kernel, 1, (tensors[0],), (), ((16,),), 4, descriptors=(described(of, rows), None))
    by_address = []
    for of, started in zip(tensors[1:], driver.launches, strict=True):
        tensor_map, *sizes = started.arguments
        assert tensor_map[:8] == pointer(of)
        rows = 64 if of is tensors[1] else 32
        assert sizes == [number(rows), number(64), *(each.to_bytes(8, "little") for each in (64, 1)),
                         pointer(tensors[0]), *NONE]  # fmt: skip
        by_address.append(tensor_map[8:])
    assert by_address[0] != by_address[1] == by_address[2]


def test_no_programs_are_none(driver: Any) -> None:
    kernel = Kernel(driver, *PARAMETERS)
    for grid in (3, (0, 4), (4, 0)):
        launch(kernel, (tensor(), tensor()), (5, 1.0), grid)
    assert not driver.launches


def test_what_the_driver_refuses_is_told(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(result: int, text: Any) -> None:
        text._obj.value = f"error {result} of the driver".encode()

    kernel = Kernel(driver, *PARAMETERS)
    monkeypatch.setattr(driver, "cuGetErrorString", tell, raising=False)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *given: 719)
    launch(kernel, (tensor(), tensor()), (5, 1.0))
    with pytest.raises(RuntimeError, match=r"refused a launch: error 719 of the driver \(719\)"):
        launch(kernel, (tensor(), tensor()), (5, 1.0))


@pytest.mark.parametrize(
    "change",
    ["parameter", "size", "scratch", "cluster", "no driver", "no descriptors", "blackwell", "padding", "rounded"],
)  # fmt: skip
def test_what_is_not_as_triton_says_is_tritons(change: str, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, compile_kernel = Kernel(driver, "key_desc", *PARAMETERS), driver.compile

    def changed(*given: Any) -> Any:
        made = compile_kernel(*given)
        if change == "parameter":
            made.sizes = [*made.sizes, 8]
        elif change == "size":
            made.sizes = [8 if size == 4 else size for size in made.sizes]
        elif change == "scratch":
            made.metadata.global_scratch_size = 16
        elif change == "cluster":
            made.metadata.num_ctas = 2
        elif change == "no descriptors":
            made.metadata.tensordesc_meta = None
        elif change == "blackwell":  # where Triton mends descriptors of few bytes
            made.metadata.target.arch = 100
        return made

    if change == "no driver":
        monkeypatch.setattr(driving, "cuda_driver", lambda: None)
    monkeypatch.setattr(driver, "compile", changed)
    tensors = tensor(), tensor()
    descriptor = described(tensors[0])
    if change == "padding":
        descriptor.padding = "nan"
    descriptor.round_f32_to_tf32 = change == "rounded"
    for _ in range(2):
        launching.launch(kernel, 3, tensors, (5, 1.0), ((70, 1, 0.5, 16),), 4, descriptors=(descriptor,))
    assert not driver.launches
    assert driver.count == 2  # one by each of Triton's ways


def test_a_thread_has_its_own_room(driver: Any) -> None:
    """Another one's arguments would come between."""
    kernel = Kernel(driver, *PARAMETERS)
    launch(kernel, (tensor(), tensor()), (5, 1.0))
    (first,) = launching._forms.found.values()
    seen: list[Any] = []

    def run() -> None:
        for _ in range(2):
            launch(kernel, (tensor(), tensor()), (5, 1.0))
        seen.extend(launching._forms.found.values())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (other,) = seen
    assert other.prepared is not first.prepared
    assert len(driver.launches) == 1


@pytest.mark.parametrize(
    ("value", "bits"),
    [(0.0, 0), (-0.0, 1 << 31), (1.0, 0x3F800000), (-0.25, 0xBE800000), (1e39, 0x7F800000), (float("-inf"), 0xFF800000),
     (1e-45, 1)],
)  # fmt: skip
def test_numbers_are_float32(value: float, bits: int) -> None:
    for _ in range(2):
        assert driving.float_bits(0.0) == 0
        assert driving.float_bits(value) == bits


SIZES = {"u64": 8, "b64": 8, "u32": 4, "b32": 4, "f32": 4, "u16": 2, "u8": 1}
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)(?: \.ptr[^,]*? \.align \d+)? \w+(?:\[(\d+)\])?")


class Ptx:
    """The driver, as far as a kernel's code says what it takes."""

    cuLaunchKernelEx = None

    def __init__(self, code: str) -> None:
        entry = code[code.index(".entry") :]
        found = PARAMETER.findall(entry[: entry.index(")")])
        self.sizes = [int(count) if count else SIZES[kind] for kind, count in found]

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0


class Hopper:
    """Triton's driver of a GPU that is not here: it compiles for one, and loads nothing."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def test_kernels_take_what_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton compiles one variant of each for Hopper: as many parameters as its code has, of the same sizes."""
    from triton.runtime.driver import driver as of_triton

    from attn_backends.backends.mla.triton_mla.state import TritonMLAState
    from attn_backends.backends.triton.state import TritonState

    cache, limits, has_gluon = KVCacheSpec(64, 64), Limits(4, 64, 4096), launching._TRITON in launching._GLUON_TRIED
    machine = launching.Machine(132, 227 << 10, True, has_gluon, True)
    chosen: dict[str, Any] = {}
    for state_cls, spec in ((TritonState, AttentionSpec(8, 2, 128, dtype=torch.bfloat16)),
                            (TritonMLAState, MLASpec(16, dtype=torch.bfloat16))):  # fmt: skip
        monkeypatch.setattr(f"{state_cls.__module__}.machine_of", lambda device: machine)
        for variant in state_cls(plan_groups({0: spec}), cache, limits, torch.device("cpu")).variants():
            chosen.setdefault(variant.name, variant)
    of_hopper = {"prefill_hopper_kernel", "mla_hopper_kernel"}
    assert {"decode_kernel", "cut_kernel", "list_kernel", *(of_hopper if has_gluon else ())} <= {*chosen}
    monkeypatch.setattr(of_triton, "_active", Hopper())
    for name, variant in chosen.items():
        compiled = variant.kernel.warmup(*variant.given, grid=(1,), **variant.options)
        ptx = Ptx(compiled.asm["ptx"])
        monkeypatch.setattr(driving, "cuda_driver", lambda ptx=ptx: ptx)
        prepared = driving.prepare_launch(compiled, *by_kind(variant))
        assert prepared is not None, name
        assert prepared.sizes == ptx.sizes


def by_kind(variant: Any) -> list[tuple[Any, ...]]:
    """A launch's descriptors, tensors, what varies, and all other numbers."""
    parameters, given = variant.kernel.params, variant.given
    descriptors = next(i for i, value in enumerate(given) if isinstance(value, torch.Tensor))
    first = next(i for i, value in enumerate(given) if i > descriptors and not isinstance(value, torch.Tensor))
    end = next(i for i, parameter in enumerate(parameters) if i >= first and not parameter.do_not_specialize)
    return [given[:descriptors], given[descriptors:first], given[first:end], given[end:]]
