"""The oracle against numbers worked by hand, and against torch's own attention in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec, AttentionType, MLASpec
from attn_backends.testing.reference import reference_attention, reference_mla, sees

LN2, LN3 = math.log(2), math.log(3)


def attend(logits: list[float], values: list[float], query: float = 1.0, **spec: Any) -> tuple[float, float]:
    """One query at the last position, one head, dims of 1: logits are query · scale · the given keys."""
    sinks = spec.pop("sink", None)
    spec = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 1, "scale": 1.0, "sinks": sinks is not None, **spec}
    out, lse = reference_attention(
        torch.tensor([[[query]]]),
        torch.tensor(logits).view(-1, 1, 1),
        torch.tensor(values).view(-1, 1, 1),
        AttentionSpec(**spec),
        sinks=None if sinks is None else torch.tensor([sinks]),
    )
    return out.item(), lse.item()


def test_softmax_of_two_keys() -> None:
    """Weights 1/4 and 3/4: exp(0) and exp(ln 3) over 4."""
    out, lse = attend([0.0, LN3], [8.0, 4.0])
    assert out == pytest.approx(8 / 4 + 4 * 3 / 4, abs=1e-6)
    assert lse == pytest.approx(math.log(4), abs=1e-6)


def test_scale_multiplies_logits() -> None:
    out, _ = attend([0.0, LN3 / 5], [8.0, 4.0], scale=5.0)
    assert out == pytest.approx(5.0, abs=1e-6)


def test_soft_cap_comes_after_the_scale() -> None:
    """2 · tanh(4 · 0.5 / 2) = 2 · tanh(1)."""
    out, lse = attend([0.0, 4.0], [0.0, 1.0], scale=0.5, logits_soft_cap=2.0)
    capped = 2 * math.tanh(1)
    assert lse == pytest.approx(math.log(1 + math.exp(capped)), abs=1e-9)
    assert out == pytest.approx(math.exp(capped) / (1 + math.exp(capped)), abs=1e-9)


def test_alibi_lowers_far_keys() -> None:
    """Slope ln 2: each position back halves a key's weight. Weights 1, 2, 4 over 7."""
    out, _ = attend([0.0, 0.0, 0.0], [7.0, 0.0, 70.0], alibi_slopes=(LN2,))
    assert out == pytest.approx(1 + 40, abs=1e-9)


def test_sink_takes_weight_and_gives_nothing() -> None:
    """Keys weigh 1 and 1, the sink 2: each key has a quarter."""
    out, lse = attend([0.0, 0.0], [4.0, 8.0], sink=LN2)
    assert out == pytest.approx(3.0, abs=1e-6)
    assert lse == pytest.approx(math.log(4), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"window_left": 0}, [5]),
        ({"window_left": 2}, [3, 4, 5]),
        ({"window_left": 9}, [0, 1, 2, 3, 4, 5]),
        ({"chunk_size": 4}, [4, 5]),
        ({"chunk_size": 5}, [5]),
        ({"causal": False}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"causal": False, "window_left": 2}, [3, 4, 5, 6, 7]),
        ({"causal": False, "attention_type": AttentionType.ENCODER}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"causal": False, "attention_type": AttentionType.CROSS}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_a_query_at_position_5_of_8_keys_sees(changes: dict[str, Any], keys: list[int]) -> None:
    spec = AttentionSpec(1, 1, 8, **changes)
    assert sees(spec, 5, torch.arange(8)).nonzero().flatten().tolist() == keys
    out, _ = reference_attention(
        torch.zeros(1, 1, 8), torch.randn(8, 1, 8), torch.eye(8)[:, None], spec, query_positions=[5]
    )
    assert out.flatten().nonzero().flatten().tolist() == keys
    assert out[0, 0, keys].tolist() == pytest.approx([1 / len(keys)] * len(keys))


def test_no_visible_key_gives_zeros() -> None:
    spec = AttentionSpec(2, 1, 4, causal=False, attention_type=AttentionType.CROSS)
    out, lse = reference_attention(torch.randn(3, 2, 4), torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), spec)
    assert torch.equal(out, torch.zeros(3, 2, 4, dtype=torch.float64))
    assert bool((lse == -torch.inf).all())


def test_context_len_and_positions_say_the_same() -> None:
    spec = AttentionSpec(2, 1, 4, window_left=3)
    query, key, value = torch.randn(3, 2, 4), torch.randn(9, 1, 4), torch.randn(9, 1, 4)
    whole = reference_attention(query, key, value, spec)
    for how in ({"context_len": 6}, {"query_positions": [6, 7, 8]}):
        for got, want in zip(reference_attention(query, key, value, spec, **how), whole, strict=True):
            assert torch.equal(got, want)
    swapped, _ = reference_attention(query.flip(0), key, value, spec, query_positions=[8, 7, 6])
    assert torch.equal(swapped.flip(0), whole[0])


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_sdpa_in_float64(num_qo_heads: int, num_kv_heads: int, causal: bool) -> None:
    spec = AttentionSpec(num_qo_heads, num_kv_heads, 16, head_dim_vo=8, scale=0.3, causal=causal)
    query = torch.randn(11, num_qo_heads, 16, dtype=torch.float64)
    key = torch.randn(11, num_kv_heads, 16, dtype=torch.float64)
    value = torch.randn(11, num_kv_heads, 8, dtype=torch.float64)
    out, _ = reference_attention(query, key, value, spec)
    repeated = [t.repeat_interleave(spec.group_size, dim=1).transpose(0, 1) for t in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), *repeated, is_causal=causal, scale=0.3
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-13, atol=1e-13)


def test_lse_is_natural_and_per_token_and_head() -> None:
    spec = AttentionSpec(2, 2, 4, scale=1.0)
    query, key = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    _, lse = reference_attention(query, key, key, spec)
    assert lse.shape == (3, 2)
    assert lse[2, 1].item() == pytest.approx(math.log(sum(math.exp(float(query[2, 1] @ key[j, 1])) for j in range(3))))


def test_sinks_must_fit_the_spec() -> None:
    tensors = (torch.randn(1, 1, 4),) * 3
    with pytest.raises(ValueError, match="sinks are missing"):
        reference_attention(*tensors, AttentionSpec(1, 1, 4, sinks=True))
    with pytest.raises(ValueError, match="sinks are given"):
        reference_attention(*tensors, AttentionSpec(1, 1, 4), sinks=torch.zeros(1))


def test_mla_by_hand() -> None:
    """Two heads over one latent column and one shared key: every number is written out."""
    spec = MLASpec(2, head_dim=2, head_dim_vo=1, kv_lora_rank=1, qk_rope_head_dim=1, scale=1.0)
    latent, rope_key = torch.tensor([[2.0], [-1.0]]), torch.tensor([[0.5], [0.25]])
    weight = torch.tensor([[3.0], [5.0], [-1.0], [7.0]])  # W_UK and W_UV of head 0, then of head 1
    query = torch.tensor([[[1.0, 4.0], [2.0, 8.0]]])
    out, lse = reference_mla(query, latent, rope_key, weight, spec)
    for head, logits in enumerate(([1 * 6 + 4 * 0.5, -3 + 4 * 0.25], [2 * -2 + 8 * 0.5, 2 * 1 + 8 * 0.25])):
        total = math.exp(logits[0]) + math.exp(logits[1])
        w_uv = (5.0, 7.0)[head]
        expected = (math.exp(logits[0]) * 2 * w_uv - math.exp(logits[1]) * w_uv) / total
        assert float(out[0, head, 0]) == pytest.approx(expected, rel=1e-12)
        assert float(lse[0, head]) == pytest.approx(math.log(total), rel=1e-12)
