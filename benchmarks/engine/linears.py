"""Linear layers of one decode step of SmolLM2-135M (211 products, random weights): as they are, merged, packed, both.

python -m benchmarks engine linears
"""

from __future__ import annotations

import torch

from attn_backends.engine.models.fused.linears import merge_projections, pack_linears
from benchmarks.lib.harness import alternate_ms, report

HIDDEN, KV, INTERMEDIATE, LAYERS, VOCAB = 576, 192, 1536, 30, 49152


class Layer(torch.nn.Module):
    """The projections of one decoder layer, under the names that Hugging Face models give them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, KV), "v_proj": (HIDDEN, KV),
                  "o_proj": (HIDDEN, HIDDEN), "gate_proj": (HIDDEN, INTERMEDIATE),
                  "up_proj": (HIDDEN, INTERMEDIATE), "down_proj": (INTERMEDIATE, HIDDEN)}  # fmt: skip
        for name, (inputs, outputs) in shapes.items():
            self.add_module(name, torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype))

    def forward(self, hidden: torch.Tensor, wide: torch.Tensor) -> None:
        for name, layer in self.named_children():
            layer(wide if name == "down_proj" else hidden)


class Model(torch.nn.Module):
    """Thirty layers and the head."""

    def __init__(self, dtype: torch.dtype, merge: bool, pack: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(dtype) for _ in range(LAYERS))
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
        self.requires_grad_(False)
        if merge:
            merge_projections(self)
        if pack:
            pack_linears(self)

    def forward(self, hidden: torch.Tensor, wide: torch.Tensor) -> None:
        for layer in self.layers:
            layer(hidden, wide)
        self.head(hidden)


@torch.inference_mode()
def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        models = {
            "plain": Model(dtype, merge=False, pack=False),
            "merged": Model(dtype, merge=True, pack=False),
            "packed": Model(dtype, merge=False, pack=True),
            "both": Model(dtype, merge=True, pack=True),
        }
        for tokens in (1, 2, 3, 4, 8, 16, 64, 256):
            hidden, wide = (torch.randn(tokens, width).to(dtype) for width in (HIDDEN, INTERMEDIATE))
            times = alternate_ms({name: lambda m=model: m(hidden, wide) for name, model in models.items()})  # noqa: B023
            row = {f"{name} ms": time for name, time in times.items()}
            rows.append({"dtype": str(dtype).removeprefix("torch."), "tokens": tokens, **row,
                         "plain / both": times["plain"] / times["both"]})  # fmt: skip
    report("linears", "linear layers of one SmolLM2-135M step", rows)


if __name__ == "__main__":
    main()
