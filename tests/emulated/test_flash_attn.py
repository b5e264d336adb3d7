"""The emulated FlashAttention: layouts, traps, schedules and refusals, as the real libraries have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec
from attn_backends.testing.reference import reference_attention
from tests.emulated import flash_attn, flash_attn_4, flash_attn_interface, vllm_flash_attn
from tests.emulated.flash_attn_interface import Shape

HEADS, KV_HEADS, DIM = 4, 2, 32
SLOPES = tuple(2.0**-h for h in range(HEADS))


class Case:
    """Rows over shuffled pages, with their answer."""

    def __init__(
        self, query_lens: tuple[int, ...], kv_lens: tuple[int, ...], page_size: int, head_dim: int = DIM
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query_lens, self.kv_lens, self.page_size = query_lens, kv_lens, page_size
        width = max(1, *(-(-n // page_size) for n in kv_lens))
        self.table = torch.randperm(len(kv_lens) * width, generator=generator).int().view(-1, width)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.lens = torch.tensor(kv_lens).int()
        self.query = torch.randn(sum(query_lens), HEADS, head_dim, generator=generator).half()
        shape = (len(kv_lens) * width, page_size, KV_HEADS, head_dim)
        self.key, self.value = (torch.randn(shape, generator=generator).half() for _ in "kv")

    def expected(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sinks = changes.pop("sink_values", None)
        spec = AttentionSpec(
            HEADS, KV_HEADS, self.query.shape[-1], dtype=torch.float16, sinks=sinks is not None, **changes
        )
        parts = []
        for query, pages, length in zip(self.query.split(self.query_lens), self.table, self.kv_lens, strict=True):
            key, value = (cached[pages].flatten(0, 1)[:length] for cached in (self.key, self.value))
            parts.append(reference_attention(query, key, value, spec, sinks=sinks))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-3, rtol=2e-3)


def kvcache(case: Case, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = case.query.unflatten(0, (len(case.query_lens), -1))
    how = {"causal": True, "return_softmax_lse": True, **how}
    out, lse = flash_attn.flash_attn_with_kvcache(
        rows, case.key, case.value, cache_seqlens=case.lens, block_table=case.table, **how
    )
    return out.flatten(0, 1), lse


def varlen3(case: Case, **how: Any) -> Any:
    how = {"causal": True, "return_softmax_lse": True, "fa_version": 3, **how}
    sizes = {"max_seqlen_q": max(case.query_lens), "max_seqlen_k": max(case.kv_lens)}
    return vllm_flash_attn.flash_attn_varlen_func(
        case.query, case.key, case.value, **sizes, cu_seqlens_q=case.starts, seqused_k=case.lens,
        block_table=case.table, **how,
    )  # fmt: skip


def forward4(case: Case, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"cu_seqlens_q": case.starts, "seqused_k": case.lens, "page_table": case.table, "causal": True,
             "return_lse": True, **how}  # fmt: skip
    out, lse, *_ = flash_attn_4._flash_attn_fwd(case.query, case.key, case.value, **given)
    assert lse is not None
    return out, lse


def schedule(case: Case, **changes: Any) -> torch.Tensor:
    sizes = {"max_seqlen_q": max(case.query_lens), "max_seqlen_k": max(case.kv_lens)}
    given = {"batch_size": len(case.lens), **sizes, "num_heads_q": HEADS, "num_heads_kv": KV_HEADS, "headdim": DIM,
             "cache_seqlens": case.lens, "cu_seqlens_q": case.starts, "page_size": case.page_size,
             "causal": True}  # fmt: skip
    made: torch.Tensor = vllm_flash_attn.get_scheduler_metadata(**{**given, **changes})
    return made


# Layouts.


def test_flash_attention_2_has_rows_before_heads() -> None:
    case = Case((3, 3), (40, 300), 256)
    (out, lse), (want, want_lse) = kvcache(case), case.expected()
    close(out, want)
    assert lse.shape == (2, HEADS, 3)
    close(lse.transpose(1, 2).flatten(0, 1), want_lse)


@pytest.mark.parametrize("function", [varlen3, forward4])
def test_flash_attention_3_and_4_have_heads_first(function: Any) -> None:
    case = Case((3, 1, 9), (40, 300, 9), 16)
    (out, lse), (want, want_lse) = function(case), case.expected()
    close(out, want)
    assert lse.shape == (HEADS, 13)
    close(lse.t(), want_lse)


def test_rows_without_keys() -> None:
    """Zeros; the LSE is plus infinity in 2 and minus infinity in 3 and 4."""
    case = Case((1, 1), (0, 9), 256)
    for (out, lse), infinity in (
        (kvcache(case), torch.inf), (varlen3(case), -torch.inf), (forward4(case), -torch.inf)
    ):  # fmt: skip
        assert bool((out[0] == 0).all())
        assert bool((lse.flatten() == infinity).sum() == HEADS)


def test_the_three_functions_agree() -> None:
    case = Case((3, 1, 9), (40, 300, 9), 256)
    expected, _ = case.expected()
    close(varlen3(case, fa_version=2)[0], expected)
    made = flash_attn_interface.flash_attn_with_kvcache(
        case.query, case.key, case.value, cache_seqlens=case.lens, page_table=case.table, cu_seqlens_q=case.starts,
        max_seqlen_q=9, causal=True,
    )  # fmt: skip
    close(made, expected)


# Traps.


@pytest.mark.parametrize("query_lens", [(1, 1), (2, 2)])
def test_alibi_moves_the_lse_of_causal_calls_alone(query_lens: tuple[int, ...]) -> None:
    case = Case(query_lens, (40, 300), 256)
    (want, want_lse), slopes = case.expected(alibi_slopes=SLOPES), torch.tensor(SLOPES)
    out, lse = kvcache(case, alibi_slopes=slopes)
    close(out, want)
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, case.kv_lens, strict=True)])
    close(lse.transpose(1, 2).flatten(0, 1), want_lse + positions[:, None] * slopes)
    out, lse = kvcache(case, alibi_slopes=slopes, causal=False, window_size=(511, 0))
    close(out, want)
    close(lse.transpose(1, 2).flatten(0, 1), want_lse)


def test_an_output_is_in_another_order_where_heads_are_taken_for_tokens() -> None:
    case = Case((1, 1), (40, 300), 256)
    given = (case.query[:, None], case.key, case.value, None, None, case.lens, None, None, None, None, case.table, None)
    how = (DIM**-0.5, False, -1, -1, 0.0, False, 0)
    with pytest.raises(RuntimeError, match="out must have shape"):
        flash_attn.fwd_kvcache(*given, torch.empty_like(case.query)[:, None], *how)
    out = torch.empty_like(case.query)
    flash_attn.fwd_kvcache(*given, out.view(2, KV_HEADS, -1, DIM).transpose(1, 2), *how)
    close(out, case.expected()[0])


def test_the_varlen_function_leaves_an_output_of_single_tokens_alone() -> None:
    case = Case((1, 1), (40, 300), 256)
    for most, is_written in ((1, False), (2, True)):
        out = torch.full_like(case.query, 7.0)
        flash_attn.varlen_fwd(
            case.query, case.key, case.value, out, case.starts, case.starts, case.lens, None, case.table, None, most,
            300, 0.0, DIM**-0.5, False, True, -1, -1, 0.0, False, None,
        )  # fmt: skip
        assert bool((out != 7.0).all()) == is_written


def test_sinks_join_the_softmax_and_the_lse() -> None:
    case, sinks = Case((1, 4), (40, 30), 16), torch.tensor([0.5, 1.0, -2.0, 3.0])
    (out, lse), (want, want_lse) = varlen3(case, s_aux=sinks.bfloat16()), case.expected(sink_values=sinks)
    close(out, want)
    close(lse.t(), want_lse)


def test_sinks_of_flash_attention_4_are_the_lse_of_rows_without_keys() -> None:
    case, sinks = Case((1, 4), (0, 30), 16), torch.tensor([0.5, 1.0, -2.0, 3.0])
    (out, lse), (want, want_lse) = forward4(case, learnable_sink=sinks), case.expected(sink_values=sinks)
    close(out, want)
    close(lse.t()[1:], want_lse[1:])
    assert torch.equal(lse[:, 0], sinks)


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({}, {"window_size_left": -1, "window_size_right": -1}),
        ({"window_left": 7}, {"window_size_left": 7, "window_size_right": 0}),
        ({"window_left": 7, "causal": False}, {"window_size_left": 7, "causal": False}),
        ({"causal": False, "logits_soft_cap": 2.0}, {"causal": False, "softcap": 2.0}),
    ],
)
def test_masks_of_flash_attention_4(changes: dict[str, Any], how: dict[str, Any]) -> None:
    case = Case((1, 4), (40, 30), 16)
    close(forward4(case, **how)[0], case.expected(**changes)[0])


@pytest.mark.parametrize(("page_size", "reaches"), [(16, False), (128, True), (256, False)])
def test_nan_behind_a_row_reaches_it_from_pages_that_are_tiles(page_size: int, reaches: bool) -> None:
    case = Case((1, 1), (140, page_size), page_size)
    case.value[case.table[0, 140 // page_size], 140 % page_size :] = torch.nan
    out, _ = forward4(case)
    assert bool(out[0].isnan().any()) == reaches
    close(out[1], case.expected()[0][1])


@pytest.mark.parametrize(
    ("head_dim", "causal", "overruns"), [(64, False, False), (96, True, False), (96, False, True), (80, False, True)]
)
def test_keys_that_are_copied_past_a_tile(head_dim: int, causal: bool, overruns: bool) -> None:
    case = Case((1, 1), (40, 30), 16, head_dim)
    assert bool(forward4(case, causal=causal)[0].isnan().all()) == overruns


def test_fp8_gives_bfloat16_and_wants_a_scale_a_row_and_head() -> None:
    case = Case((1, 4), (40, 30), 16)
    case.query, case.key, case.value = (t.to(torch.float8_e4m3fn) for t in (case.query, case.key, case.value))
    plain, _ = varlen3(case)
    scaled, _ = varlen3(case, v_descale=torch.tensor([[2.0]]).expand(2, KV_HEADS))
    assert plain.dtype is scaled.dtype is torch.bfloat16
    torch.testing.assert_close(scaled, plain * 2)
    with pytest.raises(RuntimeError, match="v_descale must have shape"):
        varlen3(case, v_descale=torch.tensor([2.0]))


# Schedules.


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 8 * 1 + 1),
        ({"max_seqlen_q": 2}, 8 * 2 + 1),  # causal, and not for one token alone
        ({"max_seqlen_k": 4096}, 8 * 2 + 1),  # splits
        ({"max_seqlen_k": 4096, "num_splits": 1}, 8 * 1 + 1),
        ({"max_seqlen_k": 4096, "window": (100, 0)}, 8 * 3 + 1),
        ({"window": (100, 0)}, 8 * 1 + 1),  # a window over everything is none
        ({"head_dim": 128}, 8 * 2 + 1),  # where causal kernels have the better pages
    ],
)
def test_sizes(changes: dict[str, Any], size: int) -> None:
    plain = {"num_rows": 5, "max_seqlen_q": 1, "max_seqlen_k": 16, "head_dim": 64, "paged": True, "causal": True,
             "window": (-1, -1), "num_splits": 0}  # fmt: skip
    assert Shape(**{**plain, **changes}).size == size


def test_an_old_schedule_shows() -> None:
    case = Case((3, 1), (40, 300), 16)
    want, _ = case.expected()
    made = schedule(case)
    close(varlen3(case, scheduler_metadata=made)[0], want)
    old = schedule(case, cache_seqlens=case.lens - 20)
    assert not torch.allclose(varlen3(case, scheduler_metadata=old)[0].double(), want, atol=1e-2)
    out = torch.full_like(case.query, 7.0)
    fewer = schedule(case, cu_seqlens_q=torch.tensor([0, 1, 2]).int())
    varlen3(case, scheduler_metadata=fewer, out=out)
    assert bool((out[1:3] == 7.0).all())
    with pytest.raises(RuntimeError, match="scheduler_metadata must have shape"):
        varlen3(case, scheduler_metadata=made[:-1])


# Refusals.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"key": torch.zeros(8, 16, KV_HEADS, DIM).half()}, "must be divisible by 256"),
        ({"key": torch.zeros(8, 256, KV_HEADS, DIM)}, "query and key must have the same dtype"),
        ({"lens": torch.zeros(3, dtype=torch.int32)}, "seqlens_k must have shape"),
        ({"lens": torch.zeros(2, dtype=torch.int64)}, "seqlens_k must have dtype int32"),
        ({"lens": torch.zeros(4, dtype=torch.int32)[::2]}, "seqlens_k must be contiguous"),
        ({"table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table must have dtype"),
        ({"table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "contiguous last dimension"),
        ({"query": torch.zeros(2, 3, DIM).half()}, "must divide number of heads"),
        ({"query": torch.zeros(2, HEADS, DIM)}, "only support float16 and bfloat16"),
        ({"query": torch.zeros(2, HEADS, 264).half()}, "head dimension at most 256"),
        ({"query": torch.zeros(2, HEADS, 2 * DIM).half()[..., ::2]}, "contiguous last dimension"),
    ],
)
def test_refusals_of_flash_attention_2(changes: dict[str, Any], told: str) -> None:
    case = Case((1, 1), (40, 300), 256)
    vars(case).update(changes)
    with pytest.raises(RuntimeError, match=told):
        kvcache(case)


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        ({"alibi_slopes": torch.tensor(SLOPES)}, AssertionError, "Alibi is not supported in FA3"),
        ({"s_aux": torch.zeros(HEADS)}, RuntimeError, "We only support bf16 dtype"),
        ({"s_aux": torch.zeros(HEADS).bfloat16(), "fa_version": 2}, NotImplementedError, "FA2 does not support s_aux"),
        ({"num_splits": 2, "fa_version": 2}, NotImplementedError, "num_splits > 1"),
        ({"fa_version": 4}, ValueError, "Unsupported FA version"),
        ({"out": torch.zeros(2, HEADS, DIM)}, RuntimeError, "Output must have the same dtype"),
        ({"out": torch.zeros(3, HEADS, DIM).half()}, RuntimeError, "out must have shape"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, AssertionError, "at the same time"),
    ],
)
def test_refusals_of_vllms_function(how: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        varlen3(Case((1, 1), (40, 300), 16), **how)


def test_vllms_schedules_know_no_chunks() -> None:
    with pytest.raises(TypeError, match="attention_chunk"):
        schedule(Case((1, 1), (40, 300), 16), attention_chunk=16)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"page_table": torch.zeros(2, 19, dtype=torch.int64)}, "page_table must be int32"),
        ({"page_table": torch.zeros(2, 38, dtype=torch.int32)[:, ::2]}, "page_table must be contiguous"),
        ({"page_table": torch.zeros(3, 19, dtype=torch.int32)}, "a line a row"),
        ({"seqused_k": torch.zeros(3, dtype=torch.int32)}, "seqused_k must have shape"),
        ({"seqused_k": torch.zeros(2, dtype=torch.int64)}, "must be int32"),
        ({"seqused_k": torch.zeros(4, dtype=torch.int32)[::2]}, "must be contiguous"),
        ({"learnable_sink": torch.zeros(2)}, "learnable_sink must have shape"),
        ({"learnable_sink": torch.zeros(HEADS).double()}, "learnable_sink must be float16"),
        ({"num_splits": 2}, "SplitKV not supported on SM 9.0"),
        ({"out": torch.zeros(3, HEADS, DIM).half()}, "out shape"),
        ({"out": torch.zeros(2, HEADS, DIM)}, "out dtype"),
        ({"out": torch.zeros(2, 1, DIM).half().expand(2, HEADS, DIM)}, "broadcast"),
        ({"out": torch.zeros(2, HEADS, DIM + 1).half()[..., :DIM]}, "aligned strides"),
        ({"out": torch.zeros(2, HEADS, 2 * DIM).half()[..., ::2]}, "contiguous last dimension"),
    ],
)
def test_refusals_of_flash_attention_4(how: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        forward4(Case((1, 1), (40, 300), 16), **how)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"query": torch.zeros(2, HEADS, DIM)}, "must have the same dtype"),
        ({"query": torch.zeros(2, 3, DIM).half()}, "num_head must be divisible"),
        ({"key": torch.zeros(8, 16, KV_HEADS, DIM).half()}, "k must have the shape of v"),
        ({"value": torch.zeros(8, KV_HEADS, DIM).half()}, "v must have shape"),
        (dict.fromkeys(("query", "key", "value"), torch.float32), "inputs must be float16"),
        (dict.fromkeys(("query", "key", "value"), torch.float8_e4m3fn), "FP8 is only supported on SM100"),
    ],
)
def test_tensors_that_flash_attention_4_refuses(changes: dict[str, Any], told: str) -> None:
    case = Case((1, 1), (40, 300), 16)
    for name, new in changes.items():
        setattr(case, name, getattr(case, name).to(new) if isinstance(new, torch.dtype) else new)
    with pytest.raises(AssertionError, match=told):
        forward4(case)


@pytest.mark.parametrize(("head_dim", "told"), [(264, "not supported on SM90"), (40, "irregular head dim")])
def test_head_dims_that_flash_attention_4_refuses(head_dim: int, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        forward4(Case((1, 1), (40, 30), 16, head_dim))
