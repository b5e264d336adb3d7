"""The family's prefill by one launch for all rows: random ragged rows against float64, and each member's steps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import MLASpec, get_backend
from attn_backends.backends.mla.metadata import ExpandedTensors, RaggedRows
from attn_backends.registry import validate_options
from attn_backends.spec import KVCacheSpec, Limits, plan_groups
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, make_layer
from tests.helpers import flash_attn_mla_emulated, flashinfer_mla_emulated, flashmla_emulated  # noqa: F401 (they register)
from tests.helpers.interpreted import INTERPRETED, in_own_process, only_interpreted, run_interpreted

prefill = pytest.importorskip("attn_backends.backends.mla.prefill", reason="needs triton")

# q_nope, rope keys and values of published models, and some where no two are alike.
DIMS = {
    "deepseek": (128, 64, 128),
    "minicpm3": (64, 32, 64),
    "wide values": (64, 64, 128),
    "widest": (192, 64, 256),
    "narrow values": (40, 16, 24),
    "no alignment": (13, 8, 19),
}
MEMBERS = ("TRITON_MLA", "FLASHMLA", "FLASHINFER_MLA")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.rest
@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def ragged(query_lens: Sequence[int], key_lens: Sequence[int], causal: bool, device: str) -> RaggedRows:
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)]
    return RaggedRows(
        *(each.to(device) for each in starts), *starts, max(query_lens), max(key_lens), causal
    )  # fmt: skip


def expected_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's output and LSE in float64; zeros and -inf where there is no key."""
    logits = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, value.double()), lse.T


def check_rows(
    spec: MLASpec, query_lens: Sequence[int], key_lens: Sequence[int], causal: bool, device: str, seed: int
) -> None:
    """Values are parts of longer rows, as expansion makes them; tokens before and behind the rows are nobody's."""
    torch.manual_seed(seed)
    launches = prefill.VarlenPrefill(spec, torch.device(device))
    rows, heads, how = ragged(query_lens, key_lens, causal, device), spec.num_qo_heads, {"device": device}
    tokens, keys = sum(query_lens), sum(key_lens)
    before = 3
    query = torch.randn(before + tokens + 2, heads, spec.head_dim, **how).to(spec.dtype)
    key = torch.randn(keys, heads, spec.head_dim, **how).to(spec.dtype)
    expanded = torch.randn(keys, heads, spec.qk_nope_head_dim + spec.head_dim_vo, **how).to(spec.dtype)
    value = expanded[..., spec.qk_nope_head_dim :]
    for _ in range(2):  # a launch leaves behind what the next one wants
        output = torch.full((before + tokens + 2, heads, spec.head_dim_vo), 7.0, dtype=spec.dtype, **how)
        lse = torch.full((before + tokens + 2, heads), 7.0, **how)
        plan = launches.plan(rows)
        part = slice(before, before + tokens)
        plan.attend(ExpandedTensors(query[part], key, value, output[part], lse[part]))
        for outside in (slice(0, before), slice(before + tokens, None)):
            assert bool((output[outside] == 7).all())
            assert bool((lse[outside] == 7).all())
        at, at_key = before, 0
        for query_len, key_len in zip(query_lens, key_lens, strict=True):
            queries, seen = slice(at, at + query_len), slice(at_key, at_key + key_len)
            at, at_key = at + query_len, at_key + key_len
            if not key_len:
                assert bool((output[queries] == 0).all())
                assert bool((lse[queries] == -torch.inf).all())
                continue
            out, of_row = expected_of(query[queries], key[seen], value[seen], spec.scale, causal)
            limit = TOLERANCE[spec.dtype]
            torch.testing.assert_close(output[queries].double(), out, atol=limit, rtol=limit)
            torch.testing.assert_close(lse[queries].double(), of_row, atol=limit, rtol=limit)


def spec_of(dims: tuple[int, int, int], heads: int, dtype: torch.dtype, **more: Any) -> MLASpec:
    nope, rope, v_dim = dims
    return MLASpec(heads, head_dim=nope + rope, qk_rope_head_dim=rope, head_dim_vo=v_dim, dtype=dtype, **more)


def draw_lens(numbers: Random, causal: bool, most: int) -> tuple[list[int], list[int]]:
    """Rows of nothing among them; without a mask any numbers of queries and keys."""
    lens = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 128, 129, most)
    queries = [numbers.choice(lens) for _ in range(numbers.choice((1, 2, 5, 40 if most > 200 else 6)))]
    keys = queries if causal else [numbers.choice(lens) for _ in queries]
    return (queries, keys) if sum(queries) and sum(keys) else ([7, 0], [7, 3])


@only_interpreted
@pytest.mark.parametrize("causal", [True, False], ids=["new", "context"])
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_random_rows_interpreted(dims: tuple[int, int, int], dtype: torch.dtype, causal: bool) -> None:
    numbers = Random(f"{dims} {dtype} {causal}")
    spec = spec_of(dims, numbers.choice((1, 2, 3)), dtype, kv_lora_rank=64)
    check_rows(spec, *draw_lens(numbers, causal, 130), causal, "cpu", 0)


@only_interpreted
@pytest.mark.parametrize("causal", [True, False], ids=["new", "context"])
@pytest.mark.parametrize("seed", range(3))
def test_random_rows_by_the_kernel_for_hopper(seed: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated; more rows than a warp has lanes, too."""
    from attn_backends.kernels.prefill import hopper_kernel, launch
    from tests.helpers.gluon_emulator import Emulated

    made: list[int] = []
    monkeypatch.setattr(launch, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(
        hopper_kernel, "prefill_hopper_kernel", Emulated(hopper_kernel.prefill_hopper_kernel, made.append)
    )
    numbers = Random(f"hopper {seed} {causal}")
    lens = draw_lens(numbers, causal, 260) if seed else ([5, 0, 129] * 12, ([5, 0, 129] if causal else [70, 3, 0]) * 12)
    check_rows(spec_of((128, 64, 128), 2, torch.float16), *lens, causal, "cpu", seed)
    assert len(made) == 2


@only_interpreted
@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("member", MEMBERS)
def test_members_launch_once_a_chunk(member: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, behind decodes, over context in chunks, and latent rows of 8 bits."""
    name, device = (member, "cpu") if member == "TRITON_MLA" else (f"{member}_EMULATED", "cpu")
    check_member(name, device, torch.float16, Random(f"{member} {nth}"), nth, monkeypatch)


def check_member(
    name: str, device: str, dtype: torch.dtype, numbers: Random, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Any] = []
    attend = prefill.VarlenPlan.attend

    def noting(plan: Any, *given: Any) -> None:
        launches.append(plan)
        attend(plan, *given)

    monkeypatch.setattr(prefill.VarlenPlan, "attend", noting)
    backend = get_backend(name)
    fp8 = {"cache_dtype": torch.float8_e4m3fn} if name == "TRITON_MLA" and seed % 2 else {}
    nope, _, v_dim = numbers.choice([*DIMS.values()])
    spec = spec_of((nope, 64, v_dim), numbers.choice((1, 2, 4)), dtype, **fp8)
    query_lens = [1, 1, *(numbers.randint(9, 40) for _ in range(4))]
    seq_lens = [length + numbers.choice((0, 5, 64, 90)) for length in query_lens]
    given = {"page_size": 64, "poison": float("nan"), "seed": seed, "device": device}
    batch = random_batch(backend, spec, seq_lens, query_lens, **given)
    options = validate_options(name, {"context_workspace_tokens": 64})
    layer = make_layer(backend, batch, num_padded_reqs=2, options=options)
    step = layer.begin(batch, num_padded_reqs=2)
    chunks = step.metadata.prefill.chunks  # type: ignore[attr-defined]
    for want_lse in (False, True):
        launches.clear()
        result = layer.forward(batch, step, num_padded_reqs=2, want_lse=want_lse)
        assert_matches(result, batch, name)
        assert len(launches) == 1 + len(chunks)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("TRITON_MLA", (128, 64, 128), {"prefill_hopper_kernel"}),
        ("FLASHMLA_EMULATED", (128, 64, 128), {"prefill_hopper_kernel"}),
        ("FLASHINFER_MLA_EMULATED", (64, 64, 64), {"prefill_kernel"}),
        ("FLASH_ATTN_MLA_EMULATED", (128, 64, 128), set()),  # its library's
        ("FLASH_ATTN_MLA_EMULATED", (64, 64, 64), {"prefill_kernel"}),
        ("TORCH_MLA", (128, 64, 128), set()),
    ],
)
def test_states_list_what_their_prefills_launch(name: str, dims: tuple[int, int, int], expected: set[str]) -> None:
    launch, variants = (pytest.importorskip(f"attn_backends.kernels.{each}") for each in ("launch", "variants"))
    groups = plan_groups({0: spec_of(dims, 16, torch.bfloat16)})
    with variants.listing(launch.Machine(132, 227 << 10, True, True, True)) as found:
        state = get_backend(name).get_state_cls()(groups, KVCacheSpec(64, 64), Limits(4, 64, 4096), torch.device("cpu"))
        found.variants.clear()
        state.list_launches()  # type: ignore[attr-defined]
    assert {variant.name for variant in found.variants.values() if "prefill" in variant.name} == expected


def test_torch_mla_stays_in_torch() -> None:
    batch = random_batch(get_backend("TORCH_MLA"), MLASpec(2), [40, 9], [20, 9])
    assert make_layer(get_backend("TORCH_MLA"), batch).begin(batch).prefill_plans == (None, None)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestOnGPU:
    @pytest.mark.parametrize("causal", [True, False], ids=["new", "context"])
    @pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_random_rows(self, dims: tuple[int, int, int], dtype: torch.dtype, causal: bool) -> None:
        numbers, served = Random(f"gpu {dims} {dtype} {causal}"), 0
        for seed in range(4):
            spec = spec_of(dims, numbers.choice((1, 5, 16, 128)), dtype)
            if prefill.suits_varlen_kernel(spec, torch.device("cuda")):
                check_rows(spec, *draw_lens(numbers, causal, 1500), causal, "cuda", seed)
                served += 1
        assert served == 4 or dtype is torch.float32

    @pytest.mark.parametrize("nth", range(4))
    @pytest.mark.parametrize("member", MEMBERS)
    def test_members(self, member: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
        check_member(member, "cuda", torch.bfloat16, Random(f"gpu {member} {nth}"), nth, monkeypatch)
