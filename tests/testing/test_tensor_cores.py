"""What tensor cores cut off of an LSE in float32 is allowed, where a product is three of tf32: a model of Hopper's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attn_backends.batch.common import SequenceData
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec
from attn_backends.testing.cases.batches import Batch, MLABatch, Row
from attn_backends.testing.harness import Result, cut_off_by_tensor_cores, lse_error
from attn_backends.testing.lint.judge import Drawn
from attn_backends.testing.verify.run import Mismatch, Outcome, compare

CPU, CUDA, POOL = torch.device("cpu"), torch.device("cuda"), KVCacheSpec(64, 16)  # nothing is put on the GPU
Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS, TOKENS, KEYS, MORE_BITS = 8, 8, 400, 2


def kept(numbers: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(numbers / unit) * unit


def tf32(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to 11 bits."""
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp(torch.round(mantissa * 2**11), exponent - 11)


def add(total: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """[keys] and [8, keys]: all are cut off a little below the last place of the largest, and the sum at its own."""
    largest = torch.maximum(products.abs().amax(0), total.abs()).clamp_min(1e-300)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 24 - MORE_BITS)
    added = kept(total, unit) + kept(products, unit).sum(0)
    return kept(added, torch.ldexp(torch.ones_like(added), torch.frexp(added).exponent - 24))


def add_rounded(total: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    return (total + products.sum(0)).float().double()


def multiply(query: torch.Tensor, key: torch.Tensor, add: Add) -> torch.Tensor:
    """[columns] and [keys, columns] to [keys], as `tl.dot` has "tf32x3": what is small first."""
    high, low = tf32(query), query - tf32(query)
    key_high = tf32(key)
    total = (key_high @ tf32(low) + tf32(key - key_high) @ high).float().double()
    for i in range(0, len(query), 8):
        total = add(total, (key_high[:, i : i + 8] * high[i : i + 8]).T)
    return total


def of_one_sign(seed: int) -> MLABatch:
    """Latent rows and weights above zero: all keys of a head have nearly one logit, of either sign."""
    numbers = torch.Generator().manual_seed(seed)
    spec = MLASpec(1, head_dim=12, head_dim_vo=12, kv_lora_rank=480, qk_rope_head_dim=8, scale=0.3, dtype=torch.float32)
    draw = lambda *shape: torch.randn(*shape, generator=numbers)  # noqa: E731
    rows = tuple(
        Row(SequenceData(KEYS - TOKENS, TOKENS, None), 0.8 * draw(TOKENS, 1, 12), draw(KEYS, 480).abs(), draw(KEYS, 8))
        for _ in range(ROWS)
    )
    weight = draw(16, 480).abs() * 480**-0.5
    return MLABatch(spec, POOL, CUDA, rows, None, None, 1.0, 1.0, kv_b_proj=weight)


def lse_of(batch: MLABatch, add: Add) -> torch.Tensor:
    """LSEs [num_tokens, 1] of logits that are three products of tf32 for one."""
    found = []
    for row in batch.rows:
        query, key = batch.multiplied(row)
        for token, columns in enumerate(query[:, 0].float().double()):
            seen = key[: KEYS - TOKENS + token + 1, 0]
            logits = sum(multiply(columns[part], seen[:, part], add) for part in (slice(0, 480), slice(480, 488)))
            found.append(torch.logsumexp(logits * batch.spec.scale, 0))
    return torch.stack(found)[:, None].float()


def test_what_is_cut_off_is_allowed() -> None:
    """On a GPU, and not much more; on a CPU it is a fault."""
    batch = of_one_sign(1)
    out, lse = batch.expected()
    made, allowed = lse_of(batch, add), cut_off_by_tensor_cores(batch)
    error = lse_error(made, lse)
    assert 2e-5 < error < allowed < 4 * error
    assert lse_error(lse_of(batch, add_rounded), lse) < 1e-6  # the three products themselves lose next to nothing
    result = Result(out.float(), made, None)
    compare(Outcome(0, ""), result, batch, (out, lse), "as it is cut off")
    assert Drawn(batch).wrong(result) is None  # and so by lint
    for other, off_by in ((replace(batch, device=CPU), 0.0), (batch, 3 * error)):
        with pytest.raises(Mismatch, match="the float32 lse over float32 is off by"):
            compare(Outcome(0, ""), replace(result, lse=made + off_by), other, (out, lse), "a fault")
        assert "the LSE is off by" in str(Drawn(other).wrong(replace(result, lse=made + off_by)))


def test_usual_layers_have_the_usual_tolerance() -> None:
    numbers = torch.Generator().manual_seed(1)
    spec = AttentionSpec(8, 2, 128, dtype=torch.float32)
    query, key = (torch.randn(n, heads, 128, generator=numbers) for n, heads in ((4, 8), (KEYS, 2)))
    batch = Batch(spec, POOL, CUDA, (Row(SequenceData(KEYS - 4, 4, None), query, key, key),), None, None, 1.0, 1.0)
    grouped = torch.einsum("tkgd,jkd->tkgj", query.view(4, 2, 4, 128).abs(), key.abs())
    assert cut_off_by_tensor_cores(batch) == pytest.approx(128 / 8 * 2**-24 * float(grouped.max()) / math.sqrt(128))
    assert cut_off_by_tensor_cores(batch) < 2e-5
