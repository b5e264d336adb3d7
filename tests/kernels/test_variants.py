"""Kernels listed and compiled ahead, without a GPU: what tells two apart, and that nothing is left to compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
variants = pytest.importorskip("attn_backends.kernels.variants")
triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")

H200 = launching.Machine(132, 227 << 10, True, True, True)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, bool]]]:
    """A Hopper GPU for Triton to compile for, and the names of what it compiles or finds in its empty cache."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    gpu = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    told: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda src, cache_hit, **_: told.append((src.name, cache_hit))
    )
    with fresh_kernels():
        yield told


class fresh_kernels:
    """As in a new process: kernels have nothing compiled."""

    def __enter__(self) -> None:
        self._forget()

    def __exit__(self, *_: object) -> None:
        self._forget()

    @staticmethod
    def _forget() -> None:
        from triton.runtime.jit import JITFunction

        ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "attn_backends"]
        for each in (each for module in ours for each in vars(module).values()):
            if issubclass(type(each), JITFunction):
                each.device_caches.clear()


def writes(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    from attn_backends.cache.warm_up import list_writes

    with variants.listing(H200) as found:
        list_writes(AttentionSpec(4, 2, 64, dtype=dtype), KVCacheSpec(4), (False, True))
    return [variant for variant in found.variants.values() if variant.name == "write_kv_kernel"]


def test_compiled_once_and_found_afterwards(compiled: list[tuple[str, bool]]) -> None:
    wanted, told = writes(), []
    assert len(wanted) == 8  # scaled or not, early or not, letting the next start or not
    variants.compile_variants(wanted, CUDA, lambda *progress: told.append(progress))
    assert sorted(compiled) == [("write_kv_kernel", False)] * 8
    assert told == [(done, 8, "write_kv_kernel") for done in range(1, 9)]
    variants.compile_variants(writes(), CUDA)
    assert len(compiled) == 8
    with fresh_kernels():
        variants.compile_variants(writes(), CUDA)
    assert compiled[8:] == [("write_kv_kernel", True)] * 8


def test_what_a_launch_asks_triton_for_is_there(compiled: list[tuple[str, bool]]) -> None:
    """Real tensors in place of those without memory."""
    variants.compile_variants(writes(), CUDA)
    compiled.clear()
    for variant in writes():
        real = [torch.empty_like(given, device="cpu") if isinstance(given, torch.Tensor) else given
                for given in variant.given]  # fmt: skip
        assert variant.kernel.run(*real, grid=(1,), warmup=True, **variant.options) is not None
    assert compiled == []


def test_a_kernel_that_does_not_compile_is_named(compiled: list[tuple[str, bool]]) -> None:
    good = writes()[:1]
    with pytest.raises(
        RuntimeError, match=r"write_kv_kernel cannot be compiled for this GPU.*choose another backend \(Comp"
    ):
        variants.compile_variants([broken_write(), *good], CUDA)
    variants.compile_variants(good, CUDA)  # as ever


def broken_write() -> Any:
    bad = writes(torch.float16)[0]
    return bad._replace(given=(*bad.given[:-6], "no block", *bad.given[-5:]))


@pytest.mark.parametrize("stopped", [RuntimeError, KeyboardInterrupt])
def test_what_has_not_begun_is_not_waited_for(
    stopped: type[BaseException], compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a kernel that does not compile, and at Ctrl-C, one worker has most of a list before it."""

    def progress(*_: object) -> None:
        raise stopped

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    wanted = writes() if stopped is KeyboardInterrupt else [broken_write(), *writes()]
    ended: list[type[BaseException]] = []

    def run() -> None:
        try:
            variants.compile_variants(wanted, CUDA, progress)
        except BaseException as error:
            ended.append(type(error))

    running = Thread(target=run, daemon=True)
    running.start()
    running.join(timeout=60)
    assert ended == [stopped], "it still waits"
    assert len(compiled) < len(writes())
    variants.compile_variants(writes(), CUDA)  # what was not begun is, and nothing is compiled twice
    assert [hit for _, hit in compiled] == [False] * len(writes())


def test_a_list_launches_nothing_and_has_an_end() -> None:
    def kernel(*given: Any) -> None:
        pytest.fail("it was launched")

    kernel.params = ()  # type: ignore[attr-defined]
    with suppress(ZeroDivisionError), variants.listing(H200) as found:
        launching.start_kernel(kernel, (1,))
        launching.start_kernel(kernel, (1,))
        assert len(found.variants) == 1
        assert launching.num_multiprocessors(CPU) == 132
        raise ZeroDivisionError
    assert launching.LISTING.get() is None
    assert launching.num_multiprocessors(CPU) == 2


# What tells variants apart.


def draw_tensor(numbers: Random) -> torch.Tensor:
    dtype = numbers.choice((torch.bfloat16, torch.float32))
    return torch.empty(64, dtype=dtype, device="meta")[numbers.choice((0, 1, 8)) :]


def draw_arguments(kernel: Any, numbers: Random) -> tuple[Any, ...]:
    draws: tuple[Callable[[], Any], ...] = (
        lambda: draw_tensor(numbers), lambda: numbers.choice((0, 1, 2, 16, 48, 1 << 31, -16)),
        lambda: numbers.choice((0.5, 2.0)), lambda: None, lambda: numbers.random() < 0.5,
    )  # fmt: skip
    constants = (0, 1, 16, True, 2.5)
    return tuple(
        numbers.choice(constants) if param.is_constexpr else numbers.choice(draws)() for param in kernel.params
    )


def changed(kernel: Any, given: tuple[Any, ...], numbers: Random) -> tuple[Any, ...]:
    """With another argument or two."""
    others = draw_arguments(kernel, numbers)
    places = {numbers.randrange(len(given)) for _ in range(numbers.randint(0, 2))}
    return tuple(other if i in places else one for i, (one, other) in enumerate(zip(given, others, strict=True)))


@pytest.mark.parametrize("name", ["backends.triton.kernels.decode.decode_kernel", "cache.kernels.write_kv_kernel",
                                  "kernels.equal_cuts.cut_kernel"])  # fmt: skip
def test_a_key_is_what_triton_compiles_by(name: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    module, _, name = name.rpartition(".")
    kernel = getattr(pytest.importorskip(f"attn_backends.{module}"), name)
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    def of_triton(given: tuple[Any, ...]) -> str:
        values, specialization, _ = binder(*given)
        constants = [repr(value) for (kind, _), value in zip(specialization, values.values(), strict=True)
                     if kind == "constexpr"]  # fmt: skip
        return str(specialization) + str(constants)

    numbers, same = Random(name), 0
    for _ in range(1500):
        one = draw_arguments(kernel, numbers)
        other = changed(kernel, one, numbers)
        keys = [variants.Variant(kernel, given, {"num_warps": 4}).key for given in (one, other)]
        assert (keys[0] == keys[1]) == (of_triton(one) == of_triton(other)), (one, other)
        same += keys[0] == keys[1]
    assert 100 < same < 1400


@pytest.mark.first
@pytest.mark.rest
def test_each_kernel_of_a_layer_compiles_for_hopper(compiled: list[tuple[str, bool]]) -> None:
    """One listed variant of each, by chance; over a cache of 16 bits, and of 8."""
    state = pytest.importorskip("attn_backends.backends.triton.state")
    has_hopper_kernels = launching._TRITON in launching._GLUON_TRIED
    machine = H200._replace(has_hopper_kernels=has_hopper_kernels)
    numbers, names = Random(0), set()
    for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        spec = AttentionSpec(8, 2, 128, dtype=torch.bfloat16, cache_dtype=cache_dtype)
        with variants.listing(machine):
            from attn_backends.spec import plan_groups

            listed = state.TritonState(plan_groups({0: spec}), KVCacheSpec(64), Limits(64, 2048, 4096), CPU).variants()
        by_name: dict[str, list[Any]] = {}
        for variant in listed:
            of_cache = any(getattr(given, "dtype", None) is cache_dtype for given in variant.given)
            if of_cache or variant.name not in names:  # others are those of the other cache
                by_name.setdefault(variant.name, []).append(variant)
        variants.compile_variants([numbers.choice(of_name) for of_name in by_name.values()], CUDA)
        names |= set(by_name)
    for_hopper = {"prefill_hopper_kernel", "upcast_kernel"} if has_hopper_kernels else set()
    for_all = {"prefill_kernel", "list_kernel", "join_kernel", "decode_kernel", "cut_kernel", "write_kv_kernel"}
    for_all |= {"copy_pages_kernel"}
    assert names == for_all | for_hopper
    assert {name for name, _ in compiled} == names


@pytest.mark.parametrize(("num_requests", "forms"), [(1, 3), (63, 3), (64, 4), (65, 5), (500, 5)])
def test_lists_of_tiles_are_of_few_rows_and_of_many_if_there_can_be_as_many(num_requests: int, forms: int) -> None:
    """Each of whole batches and of mixed ones, which have tokens behind all rows as one more; and of few rows one whose
    tiles are by their own lengths."""
    from attn_backends.spec import plan_groups

    state = pytest.importorskip("attn_backends.backends.triton.state")
    split_launch = pytest.importorskip("attn_backends.kernels.prefill.split_launch")
    spec, limits = AttentionSpec(8, 2, 128, dtype=torch.bfloat16), Limits(num_requests, 2048, 4096)
    with variants.listing(H200):
        listed = state.TritonState(plan_groups({0: spec}), KVCacheSpec(64), limits, CPU).variants()
    found = [variant for variant in listed if variant.name == "list_kernel"]
    assert len(found) == forms
    wanted = {split_launch.list_form(num_rows, is_mixed=bool(mixed), by_length=bool(by_length))
              for num_rows in range(1, num_requests + 1) for mixed in (0, 1) for by_length in (0, 1)}  # fmt: skip
    assert {(variant.given[-5:], variant.options["num_warps"]) for variant in found} == wanted
