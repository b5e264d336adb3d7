"""Kernels of the fused layer against plain torch, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.interpreted import INTERPRETED, in_own_process, run_interpreted

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.isfinite().all()
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < 1e-2, f"off by {error:.2e}"


def normed(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(tokens.float(), tokens.shape[1:], weight.float(), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra", ["nothing", "norm", "residual", "norm and gate"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(33, 72), (16, 576), (80, 130)])
def test_one_token_linear(device: str, extra: str, num_rows: int, num_columns: int) -> None:
    from attn_backends.engine.models.fused.kernels import ProductTile, one_token_linear

    torch.manual_seed(num_rows)
    is_gated = "gate" in extra
    made = {"dtype": torch.float16, "device": device}
    tokens = torch.randn(1, num_columns, **made)
    weight = torch.randn(num_rows * (1 + is_gated), num_columns, **made)
    norm, residual = torch.randn(num_columns, **made), torch.randn(1, num_rows, **made)
    given = {"norm": norm, "epsilon": 1e-5} if "norm" in extra else {}
    given |= {"residual": residual} if extra == "residual" else {}
    wide = normed(tokens, norm) if "norm" in extra else tokens.float()
    expected = wide @ weight.float().T
    if is_gated:
        gate, up = expected.chunk(2, 1)
        expected = F.silu(gate) * up
    expected = expected + residual.float() if extra == "residual" else expected
    for tile in (ProductTile(4, 64, 1), None):
        close(one_token_linear(tokens, weight, is_gated=is_gated, tile=tile, **given), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_norm_rotation_and_gate(device: str) -> None:
    from attn_backends.engine.models.fused.kernels import gated, rms_norm, rotate_

    torch.manual_seed(0)
    made = {"dtype": torch.float16, "device": device}
    hidden, weight = torch.randn(5, 72, **made), torch.randn(72, **made)
    close(rms_norm(hidden, weight, 1e-5), normed(hidden, weight))
    gate, up = hidden.float().chunk(2, 1)
    close(gated(hidden), F.silu(gate) * up)
    heads, angles = torch.randn(5, 4, 24, **made), torch.randn(5, 24, device=device)
    cos, sin = angles.cos().half(), angles.sin().half()
    before = heads.float()
    turned = torch.cat((-before[..., 12:], before[..., :12]), -1)
    expected = before * cos[:, None] + turned * sin[:, None]
    expected[:, 3] = before[:, 3]
    halves = torch.cat((cos[:, :12], cos[:, :12]), 1), torch.cat((sin[:, :12], sin[:, :12]), 1)
    expected[:, :3] = (before * halves[0][:, None] + turned * halves[1][:, None])[:, :3]
    rotate_(heads, 3, *halves)
    close(heads, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_layer_agrees_with_its_original(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.engine.models.fused import cuda as fused_layer_cuda
    from attn_backends.engine.models.fused.llama_form import agree
    from attn_backends.engine.models.hf import ATTENTION_NAME
    from tests.helpers.tiny_models import tiny_model

    monkeypatch.setattr(fused_layer_cuda, "_is_plain", lambda weight: True)
    model = tiny_model("llama", num_hidden_layers=2).half().to(device)
    model.set_attn_implementation(ATTENTION_NAME)
    layer, other = model.model.layers
    fused = fused_layer_cuda.FusedCudaLayer(layer)
    for num_tokens in (1, 7):
        assert agree(layer, fused, model.model.rotary_emb, 1e-2, (num_tokens,)), num_tokens
    assert not agree(other, fused, model.model.rotary_emb, 1e-2)
    assert fused_layer_cuda.fuse_cuda_layers(model) == 2
    assert isinstance(model.model.norm, fused_layer_cuda.Norm)
