"""FlashAttention 3, for Hopper: the module `flash_attn_interface`, and vLLM's build of it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attn_backends.backends.flash_attn.built import Reader, flash_attention_3
from attn_backends.backends.flash_attn.call import Call, LayerConstants, Rows, Tensors, window_of
from attn_backends.backends.flash_attn.fa2 import VllmBuild, beside, with_sinks_above
from attn_backends.backends.flash_attn.fa3_window import BEYOND_ALL, TILES, may_see_ahead
from attn_backends.backends.flash_attn.provider import COMMON, Provider, ProviderError
from attn_backends.cache.kv_cache import quantise
from attn_backends.interface.capabilities import HALF, Capabilities, Rejection
from attn_backends.spec import FP8_DTYPES, AttentionSpec, KVCacheSpec

FP8 = torch.float8_e4m3fn
_TILE = 64  # keys, at least


class FlashAttention3(Provider):
    """What both builds share. One call serves decodes and prefills: keys are split row by row, on the device."""

    newest_compute_capability = 9
    decodes_apart = False
    kernel_dims = (64, 96, 128, 192, 256)
    read_kernels: ClassVar[Reader] = staticmethod(flash_attention_3)
    # The kernels of 96 are built, and some end in an illegal instruction, after which the device's context is dead
    # (vLLM 0.26 on an H200). Head dims that they run are left out.
    head_dims = frozenset({64, 128, 192, 256})
    # Pages that are whole tiles (64 keys and more) are copied as they are, and what lies past a row's end in its last
    # page is multiplied by 0: NaN there would reach the output (flash-attention's issues 1745, 1974, 2374).
    page_sizes: ClassVar[frozenset[int]] = frozenset({1, 2, 4, 8, 16, 32})

    def declared(self) -> Capabilities:
        return replace(
            COMMON, cache_dtypes=HALF | {FP8}, head_dims=self.head_dims, page_sizes=self.page_sizes, fp8_queries=True,
            min_compute_capability=(9, 0),
        )  # fmt: skip

    def why_not_head_dim(self, head_dim: int) -> str:
        if self.kernel_dim(head_dim) != 96:
            return super().why_not_head_dim(head_dim)
        return "Kernels of FlashAttention 3 for head dims above 64 and up to 96 end in an illegal instruction."

    def why_not_pages_of(self, page_size: int) -> str:
        if page_size % _TILE:
            return ""
        return "FlashAttention 3 lets NaN behind a row's end, in pages that are whole tiles, into its output."

    def reject(self, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device) -> list[Rejection]:
        found = super().reject(spec, cache, device)
        if spec.cache_dtype is FP8 and spec.dtype is torch.float16 and not found:
            found.append(Rejection("cache_dtype", "float8_e4m3fn with float16", "float8_e4m3fn with bfloat16",
                                   "Its kernels give bfloat16 over an fp8 cache: load the model in that."))  # fmt: skip
        return found

    def max_seq_len(self, rows: Rows, page_size: int) -> int:
        """The longest row as kernels are told it; a schedule must be told the same."""
        return rows.max_seq_len

    def schedule(
        self, spec: AttentionSpec, cache: KVCacheSpec, rows: Rows, *, causal: bool, split_keys: bool
    ) -> torch.Tensor | None:
        """i32, on the device: tiles and splits of each row, and a counter that every call leaves at 0."""
        if rows.page_table is None:
            return None
        made: torch.Tensor = self.modules[0].get_scheduler_metadata(
            batch_size=rows.num_rows,
            max_seqlen_q=rows.max_query_len,
            max_seqlen_k=self.max_seq_len(rows, cache.page_size),
            num_heads_q=spec.num_qo_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_dim,
            cache_seqlens=rows.seq_lens,
            qkv_dtype=spec.cache_dtype,
            cu_seqlens_q=rows.query_start_loc,
            page_size=cache.page_size,
            causal=causal,
            window_size=window_of(spec, causal),
            has_softcap=spec.logits_soft_cap is not None,
            num_splits=0 if split_keys else 1,
        )
        return made

    def fp8_arguments(self, given: Tensors, rows: Rows, layer: LayerConstants) -> tuple[torch.Tensor, dict[str, Any]]:
        """Queries as kernels take them over such keys, and the scales. Queries are rounded with a scale of 1."""
        if given.keys.dtype not in FP8_DTYPES:
            return given.query, {}
        shape = (rows.num_rows, given.keys.shape[-2])
        scales = {"k_descale": layer.k_scale.expand(shape), "v_descale": layer.v_scale.expand(shape)}
        return quantise(given.query, FP8, 1.0), scales


class VllmFa3(VllmBuild, FlashAttention3):
    """vLLM's build, which takes sinks."""

    name = "vllm_fa3"
    generation = 3
    page_sizes = frozenset({16, 32, 48})
    max_sinks = 64

    def reject(self, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device) -> list[Rejection]:
        found = super().reject(spec, cache, device)
        if spec.window_left >= 0 and spec.causal and self.missing() is None and not self._takes_tot_seq_lens():
            found.append(Rejection("window", f"window_left={spec.window_left} by a flash_attn_varlen_func without "
                                   "cp_tot_seqused_k", "windows by one that takes it", "Early queries may see keys "
                                   "ahead of them where it cannot be given. Try: pip install -U vllm"))  # fmt: skip
        return found

    def _takes_tot_seq_lens(self) -> bool:
        return "cp_tot_seqused_k" in inspect.signature(self.modules[0].flash_attn_varlen_func).parameters

    def tot_seq_lens(self, spec: AttentionSpec, rows: Rows, *, causal: bool) -> torch.Tensor | None:
        """More than there are, where a query might see keys ahead of it else."""
        if spec.window_left < 0 or not causal or rows.max_query_len == 1:
            return None
        stored = spec.dtype if rows.page_table is None else spec.cache_dtype
        tiles = TILES[stored.itemsize, self.kernel_dim(spec.head_dim) or 0]
        group_size = spec.num_qo_heads // spec.num_kv_heads
        if not any(may_see_ahead(tile, group_size, spec.window_left, rows) for tile in tiles):
            return None
        return torch.full((rows.num_rows,), BEYOND_ALL, dtype=torch.int32, device=rows.seq_lens.device)

    def attend(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        query, more = self.fp8_arguments(given, call.rows, layer)
        if call.tot_seq_lens is not None:
            more["cp_tot_seqused_k"] = call.tot_seq_lens
        lse = self.run(given._replace(query=query), call, layer, call.rows.seq_lens, causal=layer.causal,
                       window_size=layer.window, scheduler_metadata=call.schedule, s_aux=layer.sinks,
                       **more)  # fmt: skip
        return with_sinks_above(lse, layer.sinks) if want_lse else None


class FlashAttnInterface(FlashAttention3):
    """The authors' build, from `hopper/` of their repository. It allocates what it returns.

    Nothing here has run it: it is held against its source, emulated.
    """

    name = "flash_attn_interface"
    module_names = ("flash_attn_interface",)
    install = "pip install git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"
    sizes_by_table = True

    def library_file(self) -> Path:
        return beside(self.modules[0], "flash_attn_3/_C*.so")

    def check(self, interface: Any) -> None:
        known = "the module of flash_attn_3 with get_scheduler_metadata and return_attn_probs"
        if not hasattr(interface, "get_scheduler_metadata"):
            raise ProviderError("a flash_attn_interface without get_scheduler_metadata", known)
        if "return_attn_probs" not in inspect.signature(interface.flash_attn_varlen_func).parameters:
            raise ProviderError("a flash_attn_varlen_func without return_attn_probs", known)

    def max_seq_len(self, rows: Rows, page_size: int) -> int:
        """All that the page table can hold: its function is told nothing else."""
        return rows.max_seq_len if rows.page_table is None else rows.page_table.shape[1] * page_size

    def attend(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        rows = call.rows
        query, scales = self.fp8_arguments(given, rows, layer)
        arguments = {"softmax_scale": layer.scale, "causal": layer.causal, "window_size": layer.window,
                     "softcap": layer.soft_cap, "num_splits": 0 if call.split_keys else 1, **scales}  # fmt: skip
        starts = rows.query_start_loc
        if rows.page_table is None:
            sizes = (rows.max_query_len, rows.max_query_len)
            out, lse, *_ = self.modules[0].flash_attn_varlen_func(
                query, given.keys, given.values, starts, starts, *sizes, return_attn_probs=True, **arguments
            )
        else:
            out, lse, *_ = self.modules[0].flash_attn_with_kvcache(
                query, given.keys, given.values, cache_seqlens=rows.seq_lens, page_table=rows.page_table,
                cu_seqlens_q=starts, max_seqlen_q=rows.max_query_len, scheduler_metadata=call.schedule,
                return_softmax_lse=True, **arguments,
            )  # fmt: skip
        given.output.copy_(out)
        return lse.t() if want_lse else None
