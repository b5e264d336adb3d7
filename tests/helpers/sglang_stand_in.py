"""What our adapter touches of SGLang, as small as it can be, under SGLang's own module names.

The normal suite runs the adapter over these; `make test-engines` runs the same tests over SGLang itself.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


class ForwardMode(enum.IntEnum):
    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DRAFT_EXTEND_V2 = enum.auto()
    PREBUILT = enum.auto()
    SPLIT_PREFILL = enum.auto()
    DLLM_EXTEND = enum.auto()

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE


class AttentionBackend:
    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: Any = True, **how: Any
    ) -> Any:
        call = self.forward_decode if forward_batch.forward_mode is ForwardMode.DECODE else self.forward_extend  # type: ignore[attr-defined]
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **how)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int, logit_cap: float = 0.0,
        v_head_dim: int = -1, sliding_window_size: int = -1, is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE", logit_capping_method: str = "tanh",
        attn_type: AttentionType = AttentionType.DECODER, use_irope: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.qk_head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.use_irope, self.attn_type = is_cross_attention, use_irope, attn_type
        self.pos_encoding_mode, self.logit_capping_method = pos_encoding_mode, logit_capping_method
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        self.xai_temperature_len = -1


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None


class MHATokenToKVPool:
    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int, layer_num: int, device: str,
        enable_memory_saver: bool = False, enable_alt_stream: bool = False, v_head_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.page_size, self.dtype, self.use_hnd = page_size, dtype, False
        shapes = ((size + page_size, head_num, dim) for dim in (head_dim, v_head_dim or head_dim))
        self.k_buffer, self.v_buffer = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)] for shape in shapes
        )

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, k_scale: Any = None,
        v_scale: Any = None, layer_id_override: int | None = None,
    ) -> None:  # fmt: skip
        loc = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        if cache_k.dtype != self.dtype:
            if k_scale is not None:
                cache_k.div_(k_scale)
            if v_scale is not None:
                cache_v.div_(v_scale)
            cache_k, cache_v = cache_k.to(self.dtype), cache_v.to(self.dtype)
        for buffer, new in ((self.k_buffer[layer_id], cache_k), (self.v_buffer[layer_id], cache_v)):
            stored, bytes_of = buffer.view(torch.uint8), new.contiguous().view(torch.uint8)  # a CPU indexes no fp8
            if self.use_hnd:
                stored[loc // self.page_size, :, loc % self.page_size] = bytes_of
            else:
                stored[loc] = bytes_of


class SWAKVPool:
    def __init__(
        self, size: int, size_swa: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int,
        swa_attention_layer_ids: list[int], full_attention_layer_ids: list[int], device: str, **how: Any,
    ) -> None:  # fmt: skip
        each = {"page_size": page_size, "dtype": dtype, "head_num": head_num, "head_dim": head_dim, "device": device}
        self.full_kv_pool = MHATokenToKVPool(size, layer_num=len(full_attention_layer_ids), **each)  # type: ignore[arg-type]
        self.swa_kv_pool = MHATokenToKVPool(size_swa, layer_num=len(swa_attention_layer_ids), **each)  # type: ignore[arg-type]
        self.layers_mapping = {layer: (i, False) for i, layer in enumerate(full_attention_layer_ids)}
        self.layers_mapping |= {layer: (i, True) for i, layer in enumerate(swa_attention_layer_ids)}
        self.full_to_swa_index_mapping: torch.Tensor | None = None

    def register_mapping(self, mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        assert self.full_to_swa_index_mapping is not None
        return self.full_to_swa_index_mapping[kv_indices]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        index, is_swa = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if is_swa else self.full_kv_pool).get_kv_buffer(index)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, k_scale: Any = 1.0,
        v_scale: Any = 1.0,
    ) -> None:  # fmt: skip
        index, is_swa = self.layers_mapping[layer.layer_id]
        pool, loc = (self.swa_kv_pool, loc_info.swa_loc) if is_swa else (self.full_kv_pool, loc_info.loc)
        pool.set_kv_buffer(None, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override=index)


ATTENTION_BACKENDS: dict[str, Any] = {}


def register_attention_backend(name: str) -> Any:
    def register(make: Any) -> Any:
        ATTENTION_BACKENDS[name] = make
        return make

    return register


HOME = {
    "sglang.srt.layers.attention.base_attn_backend": (AttentionBackend,),
    "sglang.srt.layers.attention.attention_registry": (register_attention_backend,),
    "sglang.srt.layers.radix_attention": (RadixAttention, AttentionType),
    "sglang.srt.mem_cache.memory_pool": (MHATokenToKVPool, KVWriteLoc),
    "sglang.srt.mem_cache.swa_memory_pool": (SWAKVPool,),
    "sglang.srt.model_executor.forward_batch_info": (ForwardMode,),
}


def install() -> None:
    """Put them where SGLang's would be, if it is not here itself."""
    if "sglang" in sys.modules:
        return
    for name, members in HOME.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
    registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
    registry.ATTENTION_BACKENDS = ATTENTION_BACKENDS  # type: ignore[attr-defined]
    choices = sys.modules["sglang.srt.server_args"] = ModuleType("sglang.srt.server_args")
    choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES = ["triton"], ["triton"]  # type: ignore[attr-defined]
    sys.modules["sglang.srt"].server_args = choices  # type: ignore[attr-defined]
