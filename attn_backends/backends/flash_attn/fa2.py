"""FlashAttention 2: the package `flash_attn`, and vLLM's build of it."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attn_backends.backends.flash_attn.built import Reader, flash_attention_2
from attn_backends.backends.flash_attn.call import Call, LayerConstants, Rows, Tensors
from attn_backends.backends.flash_attn.provider import COMMON, Provider, ProviderError
from attn_backends.interface.capabilities import Capabilities

KNOWN = ((2, 7), (2, 9))  # of the package, from the first to below the second: its extension is called by position
KERNEL_DIMS = (32, 64, 96, 128, 192, 256)
MAX_UNIFORM = 64  # query tokens a row that the decode kernel takes: one tile; it splits keys, the other does not


class FlashAttn2(Provider):
    """PyPI's `flash-attn`. Its Python functions allocate what they return, so the extension below them is called."""

    name = "flash_attn"
    module_names = ("flash_attn", "flash_attn_2_cuda")
    install = "pip install flash-attn --no-build-isolation"
    decodes_apart = True
    lends_keys = True
    sizes_by_table = True
    kernel_dims = KERNEL_DIMS
    read_kernels: ClassVar[Reader] = staticmethod(flash_attention_2)

    def library_file(self) -> Path:
        return Path(self.modules[1].__file__)

    def check(self, package: Any, kernels: Any) -> None:
        found = tuple(map(int, re.findall(r"\d+", package.__version__)[:2]))
        if not KNOWN[0] <= found < KNOWN[1]:
            first, last = (".".join(map(str, version)) for version in KNOWN)
            raise ProviderError(f"flash-attn {package.__version__}", f"flash-attn {first} to below {last}")

    def declared(self) -> Capabilities:
        return replace(COMMON, page_size_multiple=256, alibi=True)

    def attend(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        rows = call.rows
        uniform = rows.page_table is not None and rows.query_len is not None and rows.query_len <= MAX_UNIFORM
        run = self._attend_uniform if uniform else self._attend_varlen
        return run(given, call, layer, want_lse)

    def _attend_uniform(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        """Rows of one length by the kernel for decoding."""
        rows, table, kernels = call.rows, call.rows.page_table, self.modules[1]
        assert table is not None
        assert rows.query_len is not None
        keys, values = given.keys, given.values
        capacity = table.shape[1] * keys.shape[1]
        left, right = exact_window(layer, capacity, want_lse)
        query, out = (each.unflatten(0, (rows.num_rows, rows.query_len)) for each in (given.query, given.output))
        group = query.shape[2] // keys.shape[2]
        if rows.query_len == 1 and group > 1 and left < 0 and layer.alibi_slopes is None:
            # The kernel takes the query heads of a KV head for query tokens then, and wants the output in that order.
            out = out.view(rows.num_rows, keys.shape[2], group, -1).transpose(1, 2)
        _, lse = kernels.fwd_kvcache(
            query, keys, values, None, None, rows.seq_lens, None, None, None, None, table, layer.alibi_slopes, out,
            layer.scale, layer.causal and left < 0, left, right, layer.soft_cap, False, 0 if call.split_keys else 1,
        )  # fmt: skip
        return lse.transpose(1, 2).flatten(0, 1) if want_lse else None

    def _attend_varlen(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        rows, kernels = call.rows, self.modules[1]
        query_len = rows.max_query_len
        if query_len == 1:
            query_len = 2  # at 1 the kernel reorders heads, and writes the output elsewhere
        left, right = exact_window(layer, rows.max_seq_len, want_lse)
        lens = None if rows.page_table is None else lent_lens(rows)
        result = kernels.varlen_fwd(
            *given, rows.query_start_loc, rows.query_start_loc, lens, None, rows.page_table,
            layer.alibi_slopes, query_len, rows.max_seq_len, 0.0, layer.scale, False, layer.causal and left < 0, left,
            right, layer.soft_cap, False, None,
        )  # fmt: skip
        lse = empty_idle_rows(rows, given.output, result[1].t())
        return lse if want_lse else None


class VllmBuild(Provider):
    """vLLM's build of one generation: a function for all, which writes where it is told."""

    generation: ClassVar[int]
    module_names = ("vllm.vllm_flash_attn.flash_attn_interface",)
    install = "pip install vllm"

    def library_file(self) -> Path:
        return beside(self.modules[0], f"_vllm_fa{self.generation}_C*.so")

    def check(self, interface: Any) -> None:
        """Refuse a vLLM without these kernels, or one whose function is older than sinks."""
        if "s_aux" not in inspect.signature(interface.flash_attn_varlen_func).parameters:
            raise ProviderError("a vLLM whose flash_attn_varlen_func takes no s_aux", "vllm 0.11 and newer")
        kernels = f"FA{self.generation}"
        if not getattr(interface, f"{kernels}_AVAILABLE"):
            reason = getattr(interface, f"{kernels}_UNAVAILABLE_REASON", None)
            raise ProviderError(f"a vLLM without {kernels} ({reason})", f"vllm with {kernels} kernels")

    def run(
        self, given: Tensors, call: Call, layer: LayerConstants, seq_lens: torch.Tensor | None, **more: Any
    ) -> torch.Tensor:
        """Attend; returns the LSE [num_tokens, num_qo_heads] as the kernels have it."""
        rows = call.rows
        where: dict[str, torch.Tensor | None] = {"seqused_k": seq_lens, "block_table": rows.page_table}
        if rows.page_table is None:
            where = {"cu_seqlens_k": rows.query_start_loc}
        _, lse = self.modules[0].flash_attn_varlen_func(
            *given[:3], rows.max_query_len, rows.query_start_loc, rows.max_seq_len, softmax_scale=layer.scale,
            softcap=layer.soft_cap, return_softmax_lse=True, out=given.output,
            num_splits=0 if call.split_keys else 1, fa_version=self.generation, **where, **more,
        )  # fmt: skip
        by_token: torch.Tensor = lse.t()
        return by_token


class VllmFa2(VllmBuild):
    """FlashAttention 2 as vLLM builds it: pages of any multiple of 16."""

    name = "vllm_fa2"
    generation = 2
    decodes_apart = True
    lends_keys = True
    kernel_dims = KERNEL_DIMS
    read_kernels: ClassVar[Reader] = staticmethod(flash_attention_2)

    def declared(self) -> Capabilities:
        return replace(COMMON, page_size_multiple=16, alibi=True)

    def attend(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        rows = call.rows
        left, right = exact_window(layer, rows.max_seq_len, want_lse)
        lens = None if rows.page_table is None else lent_lens(rows)
        lse = self.run(given, call, layer, lens, causal=layer.causal and left < 0,
                       window_size=(left, right), alibi_slopes=layer.alibi_slopes)  # fmt: skip
        lse = empty_idle_rows(rows, given.output, lse)
        return lse if want_lse else None


def beside(module: Any, pattern: str) -> Path:
    """The file in a module's folder, or in one below, that a pattern names; a path without a file if there is none."""
    folder = Path(module.__file__).parent
    return min(folder.glob(pattern), default=folder / pattern)


def lent_lens(rows: Rows) -> torch.Tensor:
    """Lengths [R] i32 for the kernel for rows of any lengths. It writes the LSE of a row without keys, asked for or
    not, where LSEs padded to the longest row would lie: over those of other rows, and beyond the tensor. Such a row is
    lent one key."""
    return rows.seq_lens.clamp(min=1) if rows.some_may_lack_keys else rows.seq_lens


def empty_idle_rows(rows: Rows, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Zeros, in place, and minus infinity in the LSE [num_tokens, heads], which it returns, for rows without keys: what
    a kernel gives is for the key that such a row was lent, or for its sinks alone."""
    if not rows.some_may_lack_keys:
        return lse
    idle = (rows.seq_lens == 0).repeat_interleave(rows.query_start_loc.diff(), output_size=rows.num_tokens)[:, None]
    output.masked_fill_(idle[..., None], 0.0)
    return lse.masked_fill(idle, -math.inf)


def with_sinks_above(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """LSEs [num_tokens, heads] of kernels that add sinks [heads] by themselves. Where a sink is more than 88 above the
    largest logit, its share overflows and they give +inf, or NaN where they join split keys; the LSE is the sink then,
    and the output is 0 as it is."""
    return lse if sinks is None else torch.where(lse < math.inf, lse, sinks.float())


def exact_window(layer: LayerConstants, capacity: int, want_lse: bool) -> tuple[int, int]:
    """The window to ask for.

    Causal kernels add a bias of `slope · key position` for ALiBi, which is off by `slope · query position` in the LSE
    and nowhere else. Those of a window add that of the distance, so a window over everything gives the right LSE. One
    of `capacity` keys or more would be taken for none.
    """
    left, right = layer.window
    if layer.alibi_slopes is None or not want_lse or not layer.causal:
        return left, right
    everything = max(0, capacity - 1)
    return everything if left < 0 else min(left, everything), 0
