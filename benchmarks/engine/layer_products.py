"""Products of one token on a GPU: our kernel by how it is cut, against torch's, for the layers of two models.

    python -m benchmarks engine layer_products [--every]

Each contender is a CUDA graph over copies of the weight, more than the L2 holds. "us" is that of the tile that the
engine chooses, "best us" that of the best one tried, "torch us" of `F.linear` alone, without what our kernel takes
along: normalisation, residual, gate. "of copy" is the weight's bytes a second as a share of what a copy within the
device reads and writes.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attn_backends.engine.models.fused.kernels import ProductTile, choose_tile, one_token_linear, pays
from benchmarks.lib.gpu_harness import capture, free_memory, in_turns_us, installed, make_copy
from benchmarks.lib.harness import report

COPIED_BYTES = 256 << 20


class Product(NamedTuple):
    name: str
    num_rows: int
    num_columns: int
    has_norm: bool = False
    has_residual: bool = False
    is_gated: bool = False


def products(model: str, hidden: int, qkv: int, attended: int, inner: int, vocab: int) -> list[Product]:
    return [
        Product(f"{model} q, k, v", qkv, hidden, has_norm=True),
        Product(f"{model} attention out", hidden, attended, has_residual=True),
        Product(f"{model} gate and up", inner, hidden, has_norm=True, is_gated=True),
        Product(f"{model} down", hidden, inner, has_residual=True),
        Product(f"{model} head", vocab, hidden),
    ]


PRODUCTS = [
    *products("SmolLM2-135M", 576, 960, 576, 1536, 49152),
    *products("Llama-8B", 4096, 6144, 4096, 14336, 128256),
]


def tiles() -> Iterator[ProductTile]:
    yield from (ProductTile(r, c, w) for r in (1, 2, 4, 8) for c in (512, 1024, 2048) for w in (4, 8))


def arguments_of(product: Product) -> dict[str, Any]:
    dtype: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    found: dict[str, Any] = {"is_gated": product.is_gated}
    if product.has_norm:
        found |= {"norm": torch.randn(product.num_columns, **dtype), "epsilon": 1e-5}
    if product.has_residual:
        found["residual"] = torch.randn(1, product.num_rows, **dtype)
    return found


def weight_of(product: Product) -> torch.Tensor:
    rows = product.num_rows * (2 if product.is_gated else 1)
    return torch.randn(rows, product.num_columns, dtype=torch.bfloat16, device="cuda")


def compile_some(work: list[tuple[Product, ProductTile]]) -> None:
    """In a process of its own: what it compiles lies in triton's cache for the others."""
    for product, tile in work:
        token = torch.randn(1, product.num_columns, dtype=torch.bfloat16, device="cuda")
        one_token_linear(token, weight_of(product), **arguments_of(product), tile=tile)
    torch.cuda.synchronize()


def compile_all(work: list[tuple[Product, ProductTile]], processes: int = 12) -> None:
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_some, [work[i::processes] for i in range(processes)], chunksize=1)


@torch.inference_mode()
def measure(product: Product, candidates: Sequence[ProductTile]) -> dict[str, object]:
    """Times of one product, after checking each tile's output against float32."""
    weight = weight_of(product)
    copies = [weight, *(weight.clone() for _ in range(COPIED_BYTES // (weight.numel() * 2)))]
    tokens = torch.randn(1, product.num_columns, dtype=torch.bfloat16, device="cuda")
    given = arguments_of(product)
    chosen = choose_tile(product.num_columns, product.has_norm)
    expected = reference(tokens, weight, given)
    runs = {"copy": make_copy(torch.device("cuda")).replay}
    runs["torch"] = capture(lambda: [F.linear(tokens, each) for each in copies][-1], torch.device("cuda"))
    for tile in {chosen, *candidates}:
        product_of = partial(one_token_linear, tokens, tile=tile, **given)
        error = (product_of(weight).float() - expected).norm() / expected.norm()
        assert error < 1e-2, (product, tile, error)
        runs[str(tuple(tile))] = capture(
            lambda run=product_of: [run(each) for each in copies][-1], torch.device("cuda")
        )
    us = in_turns_us(runs, 9, torch.device("cuda"))
    copy_bandwidth = 2 * (1 << 30) / us.pop("copy")
    us = {name: each / len(copies) for name, each in us.items()}
    torch_us = us.pop("torch")
    best = min(us, key=us.__getitem__)
    ours = us[str(tuple(chosen))]
    return {
        "product": product.name,
        "rows x columns": f"{weight.shape[0]} x {weight.shape[1]}",
        "us": ours,
        "of copy": weight.numel() * 2 / ours / copy_bandwidth,
        "tile": str(tuple(chosen)),
        "best us": us[best],
        "best tile": best,
        "torch us": torch_us,
        "used": pays(weight, product.has_norm) and "head" not in product.name,
    }


def reference(tokens: torch.Tensor, weight: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    wide = tokens.float()
    if "norm" in given:
        wide = F.rms_norm(wide, wide.shape[1:], given["norm"].float(), given["epsilon"])
    out = wide @ weight.float().T
    if given["is_gated"]:
        gate, up = out.chunk(2, 1)
        out = F.silu(gate) * up
    return out + given["residual"].float() if "residual" in given else out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="try every tile, not the chosen one alone")
    arguments = parser.parse_args()
    candidates = list(tiles()) if arguments.every else []
    compile_all([(product, tile) for product in PRODUCTS for tile in candidates])
    rows = []
    for product in PRODUCTS:
        rows.append(measure(product, candidates))
        print(*rows[-1].values(), flush=True)
        free_memory(torch.device("cuda"))
    report("layer_products", "products of one token, bfloat16", rows, installed("torch", "triton"))


if __name__ == "__main__":
    main()
