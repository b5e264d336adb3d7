"""FlashInfer itself, as this backend calls it: the versions that it knows, and what it asks of the device.

Nothing else here calls FlashInfer or touches what belongs to its wrappers, but for plans.py, which plans through them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.batch.csr import PagedCsr
from attn_backends.cache.kv_cache import KVCache
from attn_backends.kernels.flashinfer_package import load_flashinfer, missing_kernels
from attn_backends.spec import AttentionSpec, KVCacheSpec

KNOWN = ((0, 5, 0), (0, 8, 0))  # from the first to below the second
# What fa2's scheduler takes at its end: split size, whether not to split, blocks left to others, a uniform length.
SPLIT_ARGUMENTS = (((0, 5, 0), 2), ((0, 5, 3), 3), ((0, 6, 16), 4))
FA3_HEAD_DIMS = frozenset({64, 128, 256})
CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 8})  # query heads a KV head that decode is compiled for on CUDA cores


@dataclass(frozen=True)
class WrapperTensors:
    """Persistent tensors that a captured kernel reads, of one padded size."""

    qo_indptr: torch.Tensor  # [R + 1] i32
    csr: PagedCsr  # of R rows, with room for the indices of any batch


@dataclass(frozen=True)
class Workspaces:
    """What a wrapper's kernels work in. Its pinned buffer is another at every plan."""

    floats: torch.Tensor  # [bytes] u8, for partial results; shared by wrappers that run one after the other
    ints: torch.Tensor  # [bytes] u8, the wrapper's own, for its schedule

    def given_to(self, wrapper: Any) -> Any:
        """The wrapper, with these in place of those that it has made itself."""
        wrapper.reset_workspace_buffer(self.floats, self.ints)
        wrapper._pin_memory_int_workspace_buffer = None
        return wrapper


class Library:
    """The package `flashinfer`, or what stands for it.

    Args:
        num_sms: multiprocessors of the device.
        module: None to import the package.

    Raises:
        ImportError: a version that is not known.
    """

    def __init__(self, num_sms: int, module: Any = None) -> None:
        self.num_sms = num_sms
        self.module, found = load_flashinfer(module, *KNOWN)
        self.version: str = self.module.__version__
        self._num_split_arguments = max(count for since, count in SPLIT_ARGUMENTS if found >= since)

    def decode_wrapper(
        self, workspaces: Workspaces, cache: KVCacheSpec, tensor_cores: bool, graph: WrapperTensors | None
    ) -> Any:
        """A `BatchDecodeWithPagedKVCacheWrapper`; one for a graph has the tensors that it reads."""
        buffers = {} if graph is None else {
            "paged_kv_indptr_buffer": graph.csr.indptr,
            "paged_kv_indices_buffer": graph.csr.indices,
            "paged_kv_last_page_len_buffer": graph.csr.last_page_len,
        }  # fmt: skip
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            workspaces.floats, cache.layout, use_cuda_graph=graph is not None, use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto", **buffers,
        )  # fmt: skip
        return workspaces.given_to(wrapper)

    def prefill_wrapper(
        self, workspaces: Workspaces, cache: KVCacheSpec, kernels: str, graph: WrapperTensors | None
    ) -> Any:
        """A `BatchPrefillWithPagedKVCacheWrapper` of fa2 or fa3."""
        buffers = {} if graph is None else {
            "qo_indptr_buf": graph.qo_indptr,
            "paged_kv_indptr_buf": graph.csr.indptr,
            "paged_kv_indices_buf": graph.csr.indices,
            "paged_kv_last_page_len_buf": graph.csr.last_page_len,
        }  # fmt: skip
        wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(
            workspaces.floats, cache.layout, use_cuda_graph=graph is not None, backend=kernels, **buffers
        )
        return workspaces.given_to(wrapper)

    def ragged_wrapper(self, workspaces: Workspaces, kernels: str) -> Any:
        """A `BatchPrefillWithRaggedKVCacheWrapper`, over keys that lie together."""
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(workspaces.floats, "NHD", backend=kernels)
        return workspaces.given_to(wrapper)

    def split_arguments(self, split_size: int | None) -> tuple[int, ...]:
        """How fa2's scheduler is told to split keys: into parts of so many pages, or as it finds best."""
        return (split_size or -1, False, 0, 0)[: self._num_split_arguments]

    def merge(
        self, output: torch.Tensor, lse: torch.Tensor, other_output: torch.Tensor, other_lse: torch.Tensor
    ) -> None:
        """Join attention over two sets of keys, in place in the first. LSEs [tokens, heads] are base 2."""
        self.module.merge_state_in_place(output, lse, other_output, other_lse)


def paged(kv_cache: KVCache, cache: KVCacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's cache as wrappers take it: in the layout's own order of dimensions."""
    if cache.layout == "NHD":
        return kv_cache.key, kv_cache.value
    return kv_cache.key.transpose(1, 2), kv_cache.value.transpose(1, 2)


def missing_module(spec: AttentionSpec) -> AbstractContextManager[None]:
    """Says what to do where FlashInfer has no kernels for a layer and cannot compile them."""
    window, cap = ("on" if on else "off" for on in (spec.window_left >= 0, spec.logits_soft_cap is not None))
    encoding = "ALIBI" if spec.alibi_slopes is not None else spec.pos_encoding_mode
    return missing_kernels(
        f"head_dim {spec.head_dim}, {spec.dtype} over {spec.cache_dtype}, window {window}, soft cap {cap}, position "
        f"encoding {encoding}"
    )
