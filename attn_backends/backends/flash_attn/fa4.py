"""FlashAttention 4, on Hopper: the package `flash-attn-4`, whose kernels are compiled when they are first called."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from typing import Any

import torch

from attn_backends.backends.flash_attn.call import Call, LayerConstants, Tensors
from attn_backends.backends.flash_attn.fa2 import empty_idle_rows, with_sinks_above
from attn_backends.backends.flash_attn.provider import COMMON, Provider, ProviderError
from attn_backends.interface.capabilities import Capabilities

PACKAGE = "flash-attn-4"
KNOWN = f"{PACKAGE} 4.0.0b36 to below 4.1"
# What is asked of its function below. No public one takes `out`.
ARGUMENTS = frozenset({
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale",
    "causal", "softcap", "window_size_left", "window_size_right", "learnable_sink", "num_splits", "return_lse", "out",
})  # fmt: skip
ALIGNMENT = 16  # bytes, of an output's address and outer strides
TILES = frozenset({64, 80, 96, 112, 128})  # keys of one, by head dim and mask


class FlashAttn4(Provider):
    """PyPI's `flash-attn-4`, a module beside those of FlashAttention 2. On Hopper it never splits keys: one call serves
    decodes and prefills, `split_keys` changes nothing, and long rows of small batches are slow. The first call of each
    kind compiles for seconds.
    """

    name = "flash_attn_4"
    module_names = ("flash_attn.cute.interface", "importlib.metadata")  # it looks up its own version by another name
    install = "pip install flash-attn-4"
    newest_compute_capability = 9
    compiles_when_called = True
    decodes_apart = False
    max_sinks = sys.maxsize
    # A page as long as a tile is copied as it is, and what lies past a row's end in its last page is multiplied by 0:
    # NaN there would reach the output. Of other pages keys are copied one by one, with zeros past the end. Those of 80
    # and 96 elements overrun their tile of 144 keys, which calls without a mask have, so these head dims are left out.
    page_sizes = frozenset({1, 2, 4, 8, 16, 32, 48, 256})
    head_dims = frozenset({64, 128, 192, 256})

    def check(self, interface: Any, metadata: Any) -> None:
        version = metadata.version(PACKAGE)
        if not is_known(version):
            raise ProviderError(f"{PACKAGE} {version}", KNOWN)
        lacking = ARGUMENTS - inspect.signature(interface._flash_attn_fwd).parameters.keys()
        if lacking:
            raise ProviderError(f"{PACKAGE} {version}, whose function takes no {', '.join(sorted(lacking))}", KNOWN)

    def declared(self) -> Capabilities:
        return replace(COMMON, head_dims=self.head_dims, page_sizes=self.page_sizes, min_compute_capability=(9, 0))

    def why_not_pages_of(self, page_size: int) -> str:
        if page_size not in TILES:
            return ""
        return "FlashAttention 4 lets NaN behind a row's end, in pages as long as its tiles, into its output."

    def attend(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        if not is_aligned(given.output):  # it refuses such a one
            made = given.output.new_empty(given.output.shape)
            lse = self.attend(given._replace(output=made), call, layer, want_lse)
            given.output.copy_(made)
            return lse
        rows = call.rows
        left, right = (None if size < 0 else size for size in layer.window)  # it takes one that is below 0 as it is
        where: dict[str, torch.Tensor | None] = {"seqused_k": rows.seq_lens, "page_table": rows.page_table}
        if rows.page_table is None:
            where = {"cu_seqlens_k": rows.query_start_loc}
        lse = self.modules[0]._flash_attn_fwd(
            *given[:3], cu_seqlens_q=rows.query_start_loc, max_seqlen_q=rows.max_query_len,
            max_seqlen_k=rows.max_seq_len, softmax_scale=layer.scale, causal=layer.causal, softcap=layer.soft_cap,
            window_size_left=left, window_size_right=right, learnable_sink=layer.sinks, num_splits=1,
            return_lse=want_lse, out=given.output, **where,
        )[1]  # fmt: skip
        if not want_lse:
            return None
        # A row without keys has an LSE of its sinks.
        lse = with_sinks_above(lse.t(), layer.sinks)
        return lse if layer.sinks is None else empty_idle_rows(rows, given.output, lse)


def is_aligned(output: torch.Tensor) -> bool:
    """Whether an output and all of its rows begin at multiples of so many bytes as the kernels store at once."""
    words = ALIGNMENT // output.itemsize
    return output.data_ptr() % ALIGNMENT == 0 and not any(stride % words for stride in output.stride()[:-1])


def is_known(version: str) -> bool:
    """Whether a version is 4.0.0b36 or newer, and below 4.1."""
    found = re.fullmatch(r"4\.0\.(\d+)(?:(a|b|rc)(\d+))?(?:\.post\d+)?(?:\+.+)?", version)
    if found is None:
        return False
    patch, stage, number = found.groups()
    return (int(patch), stage or "release", int(number or 0)) >= (0, "b", 36)
