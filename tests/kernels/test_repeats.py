"""Layers that are alike repeat each other's launches: a driver is asked to start what they ask for by themselves.

On a GPU outputs are compared; elsewhere every argument of every launch, by a stand-in of the driver.
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.cache.kv_cache import KVCache, allocate_kv_cache
from attn_backends.interface import Plans
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
repeating = pytest.importorskip("attn_backends.kernels.repeats")
without_gpu = pytest.importorskip("benchmarks.lib.without_gpu")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are launched one by one")

PAGES = 512


@pytest.fixture
def driver() -> Iterator[Any]:
    with without_gpu.kernels_without_a_gpu(keeps=True) as stand_in:
        yield stand_in


@dataclass
class Layer:
    """What a call of one layer is given."""

    impl: Any
    step: Any
    cache: KVCache
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None

    def addresses(self) -> list[int]:
        """Of all tensors that do not change from one call to the next."""
        own = (self.query, self.key, self.value, *self.cache, self.output, self.lse, *self.impl._kernels.of_layer)
        return [tensor.data_ptr() for tensor in (*own, *self.step._tensors()) if tensor is not None]

    def run(self) -> None:
        self.impl.forward(self.query, self.key, self.value, self.cache, self.step, self.output, lse=self.lse)


def random_spec(rng: random.Random) -> AttentionSpec:
    num_kv_heads, dim = rng.choice([1, 2, 3, 8]), rng.choice([64, 80, 128, 256])
    dtype = rng.choice([torch.bfloat16, torch.float16])
    cache_dtype = torch.float8_e4m3fn if rng.random() < 0.2 else dtype
    heads = num_kv_heads * rng.choice([1, 3, 4, 8])
    return AttentionSpec(
        heads, num_kv_heads, dim, dtype=dtype, cache_dtype=cache_dtype,
        window_left=rng.choice([-1, -1, 100]), logits_soft_cap=rng.choice([None, None, 30.0]),
        sinks=rng.random() < 0.3, alibi_slopes=tuple(0.5**i for i in range(heads)) if rng.random() < 0.1 else None,
    )  # fmt: skip


def random_batch(rng: random.Random, device: torch.device) -> CommonAttentionMetadata:
    """Decodes, verified tokens, chunks and prompts, in the order that builders want."""
    kinds = rng.choice([("decode",), ("prompt",), ("chunk",), ("decode", "prompt"), ("decode", "verify", "chunk")])
    rows = []
    for kind in kinds:
        for _ in range(rng.choice([1, 2, 7, 20])):
            queries = {"decode": 1, "verify": rng.randint(2, 8)}.get(kind) or rng.randint(17, 200)
            rows.append((queries, queries if kind == "prompt" else queries + rng.randint(1, 900)))
    query_lens, seq_lens = zip(*rows, strict=True)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    table = torch.randint(PAGES, (len(rows), 70), dtype=torch.int32, generator=generator).to(device)
    slots = torch.randperm(PAGES * 16, generator=generator)[: sum(query_lens)].to(device)
    return CommonAttentionMetadata.from_tensors(
        16, starts.to(device, copy=True), starts, lens.to(device, copy=True), lens, table, slots
    )


def random_layers(rng: random.Random, device: torch.device, lies: str = "") -> list[Layer]:
    """Layers of one model, of which one differs: it is in another plan group, or scales its cache."""
    spec = random_spec(rng)
    names = ("first", "second", "other", "last")
    specs = dict.fromkeys(names, spec)
    if rng.random() < 0.3:
        specs["other"] = AttentionSpec(**{**vars(spec), "window_left": 33})
    backend, cache = get_backend("TRITON"), KVCacheSpec(PAGES, 16, rng.choice(["NHD", "HND"]))
    plans = Plans(backend, specs, cache, Limits(64, 16384, 2048), device, None)
    pool = allocate_kv_cache(backend, specs, cache, device)
    common = random_batch(rng, device)
    num_tokens = int(common.query_start_loc_cpu[common.num_actual_reqs])
    steps, wants_lse = plans.plan(common), rng.random() < 0.3
    lies = lies or rng.choice(["apart", "fused", "odd", "longer", "double"])
    layers = []
    for name in names:
        sinks = torch.randn(spec.num_qo_heads, device=device) if spec.sinks else None
        scales = {"k_scale": 0.5} if name == "other" and rng.random() < 0.5 else {}
        query, key, value = random_tensors(spec, num_tokens, lies, device)
        output = torch.empty(num_tokens, spec.num_qo_heads, spec.head_dim_vo, dtype=spec.dtype, device=device)
        lse = torch.empty(num_tokens, spec.num_qo_heads, device=device) if wants_lse else None
        impl = plans.bind(name, sinks=sinks, **scales)
        layers.append(Layer(impl, steps[name], pool.layers[name], query, key, value, output, lse))
    return layers


def random_tensors(spec: AttentionSpec, num_tokens: int, lies: str, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys and values, in tensors of their own, in one, beside multiples of 16 bytes, of more tokens, or keys
    of another dtype."""
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
    if lies == "fused":
        whole = torch.randn(num_tokens, sum(heads), spec.head_dim, device=device).to(spec.dtype)
        return [*whole.split(heads, 1)]
    more = 5 if lies == "longer" else 0
    made = []
    for i, count in enumerate(heads):
        shape = (num_tokens + (more if i else 0), count, spec.head_dim)
        flat = torch.randn(shape[0] * count * spec.head_dim + 3, device=device).to(spec.dtype)
        tensor = flat[3 if lies == "odd" else 0 :][: flat.numel() - 3].view(shape)
        made.append(tensor.double() if lies == "double" and i else tensor)
    return made


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating.Repeats, "run", lambda self, layer, tensors, of_step, call: call())


def started(layers: list[Layer], driver: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """What one step starts, whose layers have not run before, and what torch has written to their caches. Copies, which
    lie anywhere, are left out."""
    for layer in layers:
        layer.step._repeats._kept.clear()
        for cached in layer.cache:
            cached.zero_()
    del driver.launches[:]
    for layer in layers:
        layer.run()
    known = {address for layer in layers for address in layer.addresses()}
    launches = [
        launch._replace(arguments=tuple(without_unknown(each, known) for each in launch.arguments))
        for launch in driver.launches
    ]
    return launches, [cached.float() for layer in layers for cached in layer.cache]


def without_unknown(argument: bytes, known: set[int]) -> bytes:
    """An argument, or a descriptor, without the address of memory that comes and goes."""
    address = int.from_bytes(argument[:8], "little")
    is_address = len(argument) >= 8 and address >= 2**40
    return argument[8:] if is_address and address not in known else argument


@pytest.mark.parametrize("seed", range(40))
@torch.inference_mode()
@pytest.mark.sampled
def test_what_is_started_is_what_a_layer_asks_for(seed: int, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = random_layers(random.Random(f"repeats {seed}"), torch.device("cpu"))
    started(layers, driver)  # kernels are compiled
    repeated, written = started(layers, driver)
    one_by_one(monkeypatch)
    alone, wanted = started(layers, driver)
    assert repeated == alone
    assert repeated
    assert all(map(torch.equal, written, wanted))


@torch.inference_mode()
def test_layers_that_lie_alike_are_repeated(driver: Any) -> None:
    """So the random ones compare something."""
    counts = []
    for seed in range(30):
        layers = random_layers(random.Random(f"repeats {seed}"), torch.device("cpu"))
        started(layers, driver)
        started(layers, driver)
        kept = kept_of(layers)
        counts.append(bool(kept) and None not in kept)
    assert sum(counts) > 12


def kept_of(layers: list[Layer]) -> list[Any]:
    steps = {id(layer.step): layer.step for layer in layers}
    return [each for step in steps.values() for each in step._repeats._kept.values()]


@pytest.fixture
def alike(driver: Any) -> list[Layer]:
    """Layers that repeat the first one's launches, after a step in which kernels were compiled."""
    layers = random_layers(random.Random("alike"), torch.device("cpu"), "apart")
    with torch.inference_mode():
        started(layers, driver)
        started(layers, driver)
    assert kept_of(layers)
    assert None not in kept_of(layers)
    return layers


@torch.inference_mode()
def test_what_is_compiled_is_not_repeated_yet(driver: Any) -> None:
    """Nor does it hinder the next layer."""
    layers = random_layers(random.Random("alike"), torch.device("cpu"), "apart")
    layers[0].run()
    assert not kept_of(layers)
    layers[1].run()
    assert kept_of(layers)
    assert None not in kept_of(layers)


@torch.inference_mode()
def test_an_output_that_is_not_given(alike: list[Layer], driver: Any) -> None:
    """It is allocated, and layers are repeated all the same."""
    for layer in alike[:2]:
        before = [*kept_of(alike)]
        made = layer.impl.forward(layer.query, layer.key, layer.value, layer.cache, layer.step, lse=layer.lse)
        assert made.shape == layer.output.shape
        assert made.dtype is layer.output.dtype
        assert kept_of(alike) == before
        assert made.data_ptr().to_bytes(8, "little") in driver.launches[-1].arguments
    with pytest.raises(ValueError, match="query has shape"):
        alike[0].impl.forward(alike[0].query[0], None, None, alike[0].cache, alike[0].step)


@torch.inference_mode()
def test_bad_tensors_are_refused_to_layers_that_repeat(alike: list[Layer]) -> None:
    layer = alike[1]
    layer.query = layer.query[:, :-1]
    with pytest.raises(ValueError, match="query has shape"):
        layer.run()
    layer.query = alike[0].query.to("meta")  # of another device
    with pytest.raises(ValueError, match="output is on cpu, and the query on meta"):
        layer.run()


@torch.inference_mode()
def test_a_call_within_a_call_is_not_left_out(alike: list[Layer], driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has been recorded by itself or not."""
    inner, outer = alike[0], alike[1:]
    attend = type(outer[0].impl).attend

    def twice(impl: Any, *given: Any) -> None:
        attend(impl, *given)
        if impl is not inner.impl:
            inner.run()

    monkeypatch.setattr(type(outer[0].impl), "attend", twice)
    counts = []
    for _ in range(2):
        for layer in outer:
            layer.step._repeats._kept.clear()
        for layer in outer:
            before = driver.count
            layer.run()
            counts.append(driver.count - before)
        inner.run()
    assert len({*counts}) == 1


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@torch.inference_mode()
def test_fake_tensors_stand_for_no_others(alike: list[Layer], driver: Any) -> None:
    """Their addresses are 0, and all else of them is a real one's."""
    layer = alike[0]
    layer.step._repeats._kept.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.impl.forward(layer.query, layer.key, layer.value, layer.cache, layer.step)
    for each in alike[:2]:
        each.lse = None
        each.run()
        assert each.output.data_ptr().to_bytes(8, "little") in driver.launches[-1].arguments


@torch.inference_mode()
def test_another_thread_goes_its_own_way(alike: list[Layer], driver: Any) -> None:
    """Once: then it repeats what it has recorded itself. A thread may have a dead one's number."""
    for _ in range(2):
        before, compiled = [*map(id, kept_of(alike))], driver.count - len(driver.launches)
        thread = threading.Thread(target=lambda: [alike[1].run() for _ in range(3)])
        thread.start()
        thread.join()
        assert driver.count - len(driver.launches) > compiled
        assert [*map(id, kept_of(alike))] != before


@torch.inference_mode()
def test_a_copy_of_a_step_has_started_nothing(alike: list[Layer]) -> None:
    assert not copy.deepcopy(alike[0].step._repeats)._kept
    assert not pickle.loads(pickle.dumps(alike[0].step._repeats))._kept


@torch.inference_mode()
def test_a_layer_that_lies_in_a_steps_memory_stands_for_no_others(
    alike: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine takes both from one buffer: what a launch takes of it may be either's."""
    layer, storage_of = alike[0], repeating._storage
    shared = {layer.output.data_ptr(), next(iter(layer.step._tensors())).data_ptr()}
    monkeypatch.setattr(repeating, "_storage", lambda each: 1 if each.data_ptr() in shared else storage_of(each))
    layer.step._repeats._kept.clear()
    layer.run()
    assert [*layer.step._repeats._kept.values()] == [None]


@torch.inference_mode()
def test_forms_of_a_step_have_an_end(alike: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "_MOST_FORMS", 3)
    layer, whole = alike[0], alike[0].key
    for more in range(8):
        layer.key = torch.cat([whole, whole[:more]])
        layer.run()
        assert len(layer.step._repeats._kept) <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(56))
@torch.inference_mode()
def test_outputs_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache, outputs and LSE are those of layers that are launched one by one, and by Triton."""
    layers = random_layers(random.Random(f"repeats on a GPU {seed}"), torch.device("cuda"))
    run_anew(layers)  # kernels are compiled
    repeated = run_anew(layers)
    assert all(found.prepared is not None for found in launching._forms.found.values())
    one_by_one(monkeypatch)
    alone = run_anew(layers)
    monkeypatch.setattr(launching, "describes_launches", lambda: True)
    for name, result, *others in zip(
        ("outputs", "lse", "keys", "values"), repeated, alone, run_anew(layers), strict=True
    ):
        for other in others:
            torch.testing.assert_close(
                result, other, rtol=1e-2, atol=1e-2, msg=lambda told, name=name: f"{name}: {told}"
            )


def run_anew(layers: list[Layer]) -> tuple[list[torch.Tensor], ...]:
    """Outputs, LSE, keys and values of a step whose layers have not run before."""
    for layer in layers:
        layer.step._repeats._kept.clear()
        layer.output.fill_(7)
        for cached in layer.cache:
            cached.zero_()
    for layer in layers:
        layer.run()
    torch.cuda.synchronize()
    lse = [layer.lse.clone() for layer in layers if layer.lse is not None]
    caches = ([getattr(layer.cache, name).float() for layer in layers] for name in ("key", "value"))
    return [layer.output.clone() for layer in layers], lse, *caches
