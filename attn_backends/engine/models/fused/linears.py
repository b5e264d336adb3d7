"""Linear layers made ready for decoding, where a step is little more than one read of all weights.

Merged: projections of one input (q, k, v; gate, up) become one product. The model's code goes on calling its two or
three layers; the first call of a step computes all columns, the others return theirs.

Packed: on a CPU the weights are reordered once, for oneDNN, or in float32 for MKL where that is faster. torch reorders
them on every call otherwise, or hands small batches to a slower routine. Where products in C of ours are faster than
both (native.py), weights stay as they lie. All change results by rounding alone; benchmarks/engine/linears.py measures
them.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F

from attn_backends.engine.models.fused.native import LEAST_ROWS, NativeLinear, operators

KeyT = TypeVar("KeyT")

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as Hugging Face models name them
BATCH_HINT = 16  # tokens that the blocking is chosen for; other numbers of them give the same results
FEW_TOKENS = (1, 4)  # on some CPUs a packed product of one token takes longer than one of four
MANY_TOKENS, AT_MOST = 64, 2.0  # products in C are for decoding, and may take that much longer over a prompt
TRIAL = (3072, 576)  # a weight that all are timed with
NOISE = 0.9  # of the time of the usual choice: what takes longer than that is not worth a change


# Named to the overload: finding it takes a while at each call.
_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_with = torch.ops.mkldnn._linear_pointwise.binary
_mkl_linear: Any = torch.ops.mkl._mkl_linear.default if torch.backends.mkl.is_available() else None
CHECKED = (1, 2, 3, 5, 16, 17, 100)  # numbers of tokens that `is_right` tries


class PackedLinear(torch.nn.Module):
    """`torch.nn.Linear` for inference, over a reordered copy of its weight (oneDNN's own format; not for saving)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BATCH_HINT)
        self.bias = bias

    def forward(self, tokens: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """[..., in_features] to [..., out_features], the activation applied."""
        return _in_few_sizes(lambda rows: _linear(rows, self.packed, self.bias, activation, [], ""), tokens)

    def plus(self, tokens: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _in_few_sizes(lambda rows, to: _linear_with(rows, to, self.packed, self.bias, "add"), tokens, other)

    def times(self, tokens: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _in_few_sizes(lambda rows, by: _linear_with(rows, by, self.packed, self.bias, "mul"), tokens, other)


def padded_size(num_tokens: int) -> int:
    """The number of tokens that a packed product computes: four sizes an octave, at most a quarter more than asked.

    oneDNN makes code for each number of tokens that it meets and keeps it, 0.6 MB a product: with any number, 240
    prompts of different lengths grew a process by 0.6 GB.

    >>> [padded_size(n) for n in (1, 7, 9, 64, 65, 1000)]
    [1, 7, 10, 64, 80, 1024]
    """
    step = 1 << max(0, num_tokens.bit_length() - 3)
    return -(-num_tokens // step) * step


def _in_few_sizes(product: Callable[..., torch.Tensor], tokens: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
    """A product over `padded_size` tokens [..., features], of which only those given are returned."""
    num_tokens = tokens.numel() // tokens.shape[-1]
    if padded_size(num_tokens) == num_tokens:
        return product(tokens, *other)
    below = (0, 0, 0, padded_size(num_tokens) - num_tokens)
    rows = product(*(F.pad(each.reshape(num_tokens, -1), below) for each in (tokens, *other)))[:num_tokens]
    return rows.view(*tokens.shape[:-1], -1)


class _SharedProduct(torch.nn.Module):
    """One merged layer and, between the calls of its slices, its result. A child of each slice, found once by walks."""

    def __init__(self, layer: torch.nn.Module, widths: list[int]) -> None:
        super().__init__()
        self.layer = layer
        self.widths = widths
        self.tokens: torch.Tensor | None = None
        self.columns: tuple[torch.Tensor, ...] = ()

    def slice(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        if tokens is not self.tokens:
            self.tokens, self.columns = tokens, self.layer(tokens).split(self.widths, -1)
        out = self.columns[index]
        if index == len(self.widths) - 1:  # the last to be called: nothing of a step outlives it
            self.tokens, self.columns = None, ()
        return out


class MergedSlice(torch.nn.Module):
    """Takes the place of one merged layer: returns its columns of the shared product."""

    def __init__(self, product: _SharedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        return self.product.slice(tokens, self.index)


def merge_projections(model: torch.nn.Module) -> int:
    """Merge every set of sibling projections; returns how many sets were. Plain `Linear` layers only."""
    merged = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [linear for name in names if (linear := _replaceable(parent, name)) is not None]
            if len(linears) == len(names) and len({linear.bias is None for linear in linears}) == 1:
                product = _SharedProduct(_concatenated(linears), [linear.out_features for linear in linears])
                for index, name in enumerate(names):
                    setattr(parent, name, MergedSlice(product, index))
                merged += 1
    return merged


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every plain `Linear` that is on the CPU, of a dtype it has fast products for, by a packed one.

    Returns how many were.
    """
    packed = 0
    for parent in list(model.modules()):
        for name, _ in list(parent.named_children()):
            linear = _replaceable(parent, name)
            if linear is not None and packable(linear.weight):
                setattr(parent, name, packed_linear(linear.weight, linear.bias))
                packed += 1
    return packed


def _replaceable(parent: torch.nn.Module, name: str) -> torch.nn.Linear | None:
    """A module's plain `Linear` of this name; None where there is none, or where the module's own code reads its
    weight, as routers do for its dtype: layers in the place of `Linear` have none."""
    child, kind = getattr(parent, name, None), cast(Hashable, type(parent))
    return child if type(child) is torch.nn.Linear and f"self.{name}.weight" not in _source(kind) else None


@cache
def _source(kind: type) -> str:
    """A class's text; empty where it was made without a file."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear | PackedLinear | MklLinear:
    """The fastest layer of the three over a [out_features, in_features] weight that is `packable`."""
    if len(weight) >= LEAST_ROWS and prefers_native(weight.dtype):
        return NativeLinear(weight, bias)
    return library_linear(weight, bias)


def library_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear | MklLinear:
    """The faster layer of the two that libraries have products for, with residuals added."""
    return MklLinear(weight, bias) if prefers_mkl(weight.dtype) else PackedLinear(weight, bias)


@cache
def prefers_native(dtype: torch.dtype) -> bool:
    """Whether products of a few tokens in C of ours are faster here than libraries'. Measured once a process: 1 s."""
    if operators(dtype) is None:
        return False
    usual = MklLinear if prefers_mkl(dtype) else PackedLinear
    few, many = (_compared((NativeLinear, usual), dtype, size) for size in (FEW_TOKENS[-1], MANY_TOKENS))
    return few[NativeLinear] * NOISE < few[usual] and many[NativeLinear] < many[usual] * AT_MOST


@cache
def prefers_mkl(dtype: torch.dtype) -> bool:
    """Whether MKL's packed products of a few tokens are faster here than oneDNN's. Measured once a process: 1 s."""
    if dtype is not torch.float32 or not torch.backends.mkl.is_available() or not is_right():
        return False
    taken = _compared((PackedLinear, MklLinear), dtype, FEW_TOKENS[-1])
    return taken[MklLinear] < taken[PackedLinear]


def _compared(kinds: Sequence[Any], dtype: torch.dtype, num_tokens: int) -> dict[Any, float]:
    """Seconds that layers of each kind take, over more weights than caches hold."""
    weights, tokens = _trial_weights(dtype), torch.zeros(num_tokens, TRIAL[1], dtype=dtype, device="cpu")
    return _least_seconds({kind: [partial(kind(weight), tokens) for weight in weights] for kind in kinds})


def _trial_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(TRIAL, dtype=dtype, device="cpu") for _ in range(16)]


@cache
def min_tokens(dtype: torch.dtype) -> int:
    """How many tokens a step of one is padded to: that of `FEW_TOKENS` for which packed products are faster.

    Measured once a process, on more weights than caches hold: 0.1 s. Products in C read each weight once for both.
    """
    if prefers_native(dtype):
        return FEW_TOKENS[0]
    layers = [packed_linear(weight) for weight in _trial_weights(dtype)]
    inputs = [torch.zeros(num_tokens, TRIAL[1], dtype=dtype, device="cpu") for num_tokens in FEW_TOKENS]
    taken = _least_seconds({len(tokens): [partial(layer, tokens) for layer in layers] for tokens in inputs})
    one, few = FEW_TOKENS
    return few if taken[few] < taken[one] * NOISE else one


def _least_seconds(runs: Mapping[KeyT, Sequence[Callable[[], object]]]) -> dict[KeyT, float]:
    """The shortest time of five of each run, taken in turns, by key together: others may use the processor too."""
    taken = {key: [math.inf] * len(of_key) for key, of_key in runs.items()}
    for _ in range(5):
        for key, of_key in runs.items():
            for index, run in enumerate(of_key):
                started = time.perf_counter()
                run()
                taken[key][index] = min(time.perf_counter() - started, taken[key][index])
    return {key: sum(seconds) for key, seconds in taken.items()}


def _concatenated(linears: Sequence[torch.nn.Linear]) -> torch.nn.Linear:
    weight = torch.cat([linear.weight for linear in linears])
    merged = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    merged.weight = torch.nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        merged.bias = torch.nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return merged


def packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN has fast products for such a weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and bf16)


class MklLinear(torch.nn.Module):
    """`torch.nn.Linear` for float32 inference, over a reordered copy of its weight (MKL's own format)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), BATCH_HINT)
        self.bias = bias
        self.shape = torch.empty(1, dtype=torch.float32, device="cpu").expand(weight.shape)  # read for its shape alone

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        # It gets the number of tokens: given any other, it would read the weight as it was.
        num_tokens = tokens.numel() // tokens.shape[-1]
        out: torch.Tensor = _mkl_linear(tokens, self.packed, self.shape, self.bias, num_tokens)
        return out

    def plus(self, tokens: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self(tokens)
        return product.add_(residual)


def is_right() -> bool:
    """Whether MKL takes weights reordered for one number of tokens with others: true, but not promised."""
    generator = torch.Generator().manual_seed(0)
    weight, *inputs = (
        torch.randn(size, 130, generator=generator, dtype=torch.float32, device="cpu") for size in (96, *CHECKED)
    )
    layer = MklLinear(weight)
    return all(torch.allclose(layer(tokens), tokens @ weight.T, atol=1e-4) for tokens in inputs)
