"""Float32 products of a few tokens by MKL, over weights that it has reordered once.

For a graph a product is one operator, `attn_backends::product`: no compiler can look into MKL's own format. The
operator has the number of its layer.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

BATCH_HINT = 16  # tokens that MKL chooses its blocking for; other numbers of them give the same results
CHECKED = (1, 2, 3, 5, 16, 17, 100)  # numbers of tokens that `is_right` tries
_layers: WeakValueDictionary[int, MklLinear] = WeakValueDictionary()
_numbers = count()


class MklLinear(torch.nn.Module):
    """`torch.nn.Linear` for float32 inference, over a reordered copy of its weight (MKL's own format)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), BATCH_HINT)
        self.bias = bias
        self.shape = torch.empty(1).expand(weight.shape)  # read for its shape alone
        self.width = weight.shape[0]
        self.number = next(_numbers)
        _layers[self.number] = self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.attn_backends.product(tokens, self.number, self.width)
            return out
        return self.product(tokens)

    def product(self, tokens: torch.Tensor) -> torch.Tensor:
        # It gets the number of tokens: given any other, it would read the weight as it was.
        num_tokens = tokens.numel() // tokens.shape[-1]
        out: torch.Tensor = _linear(tokens, self.packed, self.shape, self.bias, num_tokens)
        return out

    def plus(self, tokens: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self(tokens)
        return product.add_(residual)


_linear: Any = torch.ops.mkl._mkl_linear.default if torch.backends.mkl.is_available() else None


def is_right() -> bool:
    """Whether MKL takes weights reordered for one number of tokens with others: true, but not promised."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 130, generator=generator)
    layer = MklLinear(weight)
    inputs = [torch.randn(num_tokens, 130, generator=generator) for num_tokens in CHECKED]
    return all(torch.allclose(layer.product(tokens), tokens @ weight.T, atol=1e-4) for tokens in inputs)


def _product(tokens: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return _layers[layer].product(tokens)


def _shaped(tokens: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return tokens.new_empty(*tokens.shape[:-1], width)


# By hand, as `torch.library.custom_op` checks every call for aliases.
_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define("product(Tensor tokens, int layer, int width) -> Tensor")
_library.impl("product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("attn_backends::product", _shaped, lib=_library)
