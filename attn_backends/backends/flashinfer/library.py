"""FlashInfer itself, as this backend calls it: the versions that it knows, and what it asks of the device.

Nothing else here calls FlashInfer or touches what belongs to its wrappers, but for plans.py, which plans through them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, KVCacheSpec

KNOWN = ((0, 5, 0), (0, 8, 0))  # from the first to below the second
# What fa2's scheduler takes at its end: split size, whether not to split, blocks left to others, a uniform length.
SPLIT_ARGUMENTS = (((0, 5, 0), 2), ((0, 5, 3), 3), ((0, 6, 16), 4))
FA3_HEAD_DIMS = frozenset({64, 128, 256})
CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 8})  # query heads a KV head that decode is compiled for on CUDA cores


@dataclass(frozen=True)
class GraphTensors:
    """Persistent tensors that a captured kernel reads, of one padded size."""

    qo_indptr: torch.Tensor  # [R + 1] i32
    indptr: torch.Tensor  # [R + 1] i32
    indices: torch.Tensor  # [as many as any batch has] i32
    last_page_len: torch.Tensor  # [R] i32


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
        self.module = importlib.import_module("flashinfer") if module is None else module
        self.version: str = self.module.__version__
        found = tuple(map(int, re.findall(r"\d+", self.version)[:3]))
        if not KNOWN[0] <= found < KNOWN[1]:
            first, last = (".".join(map(str, version)) for version in KNOWN)
            raise ImportError(
                f"flashinfer-python {self.version} is installed; this backend knows {first} to below {last}"
            )
        self._num_split_arguments = max(count for since, count in SPLIT_ARGUMENTS if found >= since)

    def decode_wrapper(
        self, workspaces: Workspaces, cache: KVCacheSpec, tensor_cores: bool, graph: GraphTensors | None
    ) -> Any:
        """A `BatchDecodeWithPagedKVCacheWrapper`; one for a graph has the tensors that it reads."""
        buffers = {} if graph is None else {
            "paged_kv_indptr_buffer": graph.indptr,
            "paged_kv_indices_buffer": graph.indices,
            "paged_kv_last_page_len_buffer": graph.last_page_len,
        }  # fmt: skip
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            workspaces.floats, cache.layout, use_cuda_graph=graph is not None, use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto", **buffers,
        )  # fmt: skip
        return workspaces.given_to(wrapper)

    def prefill_wrapper(
        self, workspaces: Workspaces, cache: KVCacheSpec, kernels: str, graph: GraphTensors | None
    ) -> Any:
        """A `BatchPrefillWithPagedKVCacheWrapper` of fa2 or fa3."""
        buffers = {} if graph is None else {
            "qo_indptr_buf": graph.qo_indptr,
            "paged_kv_indptr_buf": graph.indptr,
            "paged_kv_indices_buf": graph.indices,
            "paged_kv_last_page_len_buf": graph.last_page_len,
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


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; on a CPU, where kernels are emulated, those of an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_fa3(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU; on a CPU, where kernels are emulated, it is taken for one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@contextmanager
def missing_module(spec: AttentionSpec) -> Iterator[None]:
    """Say what to do where FlashInfer has no kernels for a layer and cannot compile them.

    Raises:
        RuntimeError: instead of what FlashInfer raises for a missing compiler, chained to it.
    """
    try:
        yield
    except (FileNotFoundError, OSError, RuntimeError) as error:
        told = str(error)
        if not any(word in told.lower() for word in ("nvcc", "ninja", "cuda_home", "build failed", "compil")):
            raise
        raise RuntimeError(
            f"FlashInfer has no kernels ready for head_dim {spec.head_dim}, {spec.dtype} over {spec.cache_dtype}, "
            f"window {'on' if spec.window_left >= 0 else 'off'}, soft cap "
            f"{'on' if spec.logits_soft_cap is not None else 'off'}, and cannot compile them here. Install the CUDA "
            "toolkit (nvcc) and ninja, or the ready kernels: pip install flashinfer-cubin flashinfer-jit-cache"
        ) from error
