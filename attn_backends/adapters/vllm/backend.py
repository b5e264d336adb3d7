"""vLLM's `AttentionBackend` over a class of ours: facts, taken from its `Capabilities`, and reasons."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from attn_backends.adapters.vllm import versions
from attn_backends.adapters.vllm.layers import ServedImpl
from attn_backends.adapters.vllm.mla import MLAServedImpl
from attn_backends.adapters.vllm.reasons import CACHE_DTYPES, options_from, reasons_against
from attn_backends.interface import Capabilities
from attn_backends.registry import get_backend


class ServedBackend(AttentionBackend):  # type: ignore[misc]
    """A backend of ours under a name of vLLM's. `served` makes a subclass for each."""

    ours: ClassVar[str]  # in our registry
    member: ClassVar[str]  # in vLLM's
    impl_cls: ClassVar[type]
    builder_cls: ClassVar[type]
    impl_base: ClassVar[type] = ServedImpl

    forward_includes_kv_cache_update = True  # one pass over a layer, and no operator more in vLLM's graph
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]  # ours says which
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @classmethod
    def can(cls) -> Capabilities:
        return get_backend(cls.ours).capabilities()

    @classmethod
    def get_name(cls) -> str:
        return cls.member

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder_cls

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Page sizes, those first that the backend prefers on this device."""
        sizes = cls.can().page_sizes
        if sizes is None:
            return [MultipleOf(cls.can().page_size_multiple)]
        preferred = get_backend(cls.ours).preferred_page_sizes(current_platform.device_type)
        return sorted(sizes, key=lambda size: (size not in preferred, size))

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The size that the backend was measured with."""
        for size in get_backend(cls.ours).preferred_page_sizes(current_platform.device_type):
            if cls.supports_block_size(size):
                return size
        return int(super().get_preferred_block_size(default_block_size))

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return sorted(cls.can().head_dims or ())

    @classmethod
    def supports_sink(cls) -> bool:
        return cls.can().sinks

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return cls.can().window

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Plans are made with the host's query lengths."""
        return False

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Our reasons. vLLM asks where it has a choice of backends: not on a CPU, where the builder refuses."""
        config = get_current_vllm_config_or_none()
        page_size = cls.get_preferred_block_size(16)
        model, parallel = (getattr(config, name, None) for name in ("model_config", "parallel_config"))
        return reasons_against(
            cls.ours, asked, current_platform.device_type, options_from(config), model, parallel,
            sorted(cls.can().layouts)[-1], page_size,
        )  # fmt: skip

    # How a cache lies: these up to vLLM 0.28,

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        layouts = cls.can().layouts
        return None if len(layouts) > 1 else next(iter(layouts))

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The dimensions of [blocks, heads, block_size, dims] in the order they lie, or of [layers, …]."""
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if versions.current_layout() == "NHD" else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if versions.current_layout() == "NHD" else (0, 1, 2, 3)

    # and this one from 0.29 on.

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return versions.vllm_layouts(cls.can().layouts)


class MLAServedBackend(ServedBackend):
    """The same for the MLA family: a cache of latent rows, which have no heads."""

    impl_base = MLAServedImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any: vLLM's word for the width of a latent row. Our reasons say which are served."""
        return []

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3) if include_num_layers_dimension else (0, 1, 2)
