"""TORCH's scratch for gathered keys and values, and the buffers of its graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.backends.torch.metadata import NOTHING_ELSE, DecodeBatch, TorchMetadata, bias_dtype, graph_num_keys
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.cache.kv_cache import KVCache
from attn_backends.cache.warm_up import list_cache_writes
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.interface import AttentionState, AttentionStep, GraphState
from attn_backends.kernels.warm_up import compile_listed
from attn_backends.machine import Progress
from attn_backends.spec import PlanGroup


@dataclass(frozen=True)
class TorchStep(AttentionStep[TorchMetadata]):
    """A step with the state's scratch for gathered keys and values."""

    scratch: tuple[torch.Tensor, torch.Tensor] | None  # two of [bytes] u8; None: gather into fresh tensors


def room_in(step: TorchStep, kv_cache: KVCache, num_tokens: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The step's scratch as two tensors [num_tokens, num_kv_heads, dim] like the cache's; None where it has no room."""
    if step.scratch is None:
        return None, None
    rooms: list[torch.Tensor | None] = []
    for scratch, cached in zip(step.scratch, kv_cache, strict=True):
        shape = (num_tokens, *cached.shape[2:])
        num_bytes = math.prod(shape) * cached.itemsize
        fits = num_bytes <= scratch.numel()
        rooms.append(scratch[:num_bytes].view(cached.dtype).view(shape) if fits else None)
    return rooms[0], rooms[1]


class TorchGraphState(GraphState[TorchMetadata, TorchStep]):
    """The state of one captured size, over buffers of its own."""

    def __init__(self, parent: TorchState, num_rows: int, query_len: int) -> None:
        super().__init__(parent, num_rows, query_len)
        self.steps = {
            group.index: TorchStep(self._metadata(group, num_rows, query_len), parent.scratch) for group in self.groups
        }

    def _metadata(self, group: PlanGroup[Any], num_rows: int, query_len: int) -> TorchMetadata:
        spec, device = group.spec, self.device
        num_keys = graph_num_keys(spec, query_len, self.options, self.limits)
        heads = (spec.num_kv_heads, spec.group_size) if spec.alibi_slopes is not None else (1, 1)
        batch = DecodeBatch(
            num_rows,
            torch.zeros(num_rows * num_keys, dtype=torch.int64, device=device),
            torch.zeros(num_rows, *heads, query_len, num_keys, dtype=bias_dtype(spec), device=device),
            None,
            query_len,
            torch.zeros(num_rows * query_len, dtype=torch.bool, device=device),
        )
        slot_mapping = torch.full((self.num_tokens,), PAD_SLOT, dtype=torch.int64, device=device)
        of_step = group.index, slot_mapping, num_rows, self.num_tokens
        return TorchMetadata.of_graph(*of_step, decode_batch=batch, **NOTHING_ELSE)

    def get_graph_input_buffers(self, metadata: TorchMetadata) -> dict[str, torch.Tensor]:
        return _inputs(self.steps[metadata.group_index].metadata)

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: TorchMetadata) -> None:
        for name, tensor in _inputs(metadata).items():
            buffers[name].copy_(tensor)


class TorchState(AttentionState[TorchMetadata]):
    """Owns one scratch for gathered keys and one for values: the longest row of any group, or rows taken together.

    On a CPU a fresh allocation of that size goes back to the system after each layer, which costs more than the gather.
    On a GPU torch's caching allocator keeps it, and there is no scratch.
    """

    backend_name = "TORCH"
    graph_cls = TorchGraphState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options = self.options or TorchOptions()
        self.scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.device.type == "cpu":
            page_size = self.cache.page_size
            tokens = -(-self.limits.max_model_len // page_size) * page_size
            specs = [group.spec for group in self.groups]
            per_key = max(s.num_kv_heads * s.head_dim * s.cache_dtype.itemsize for s in specs)
            per_value = max(s.num_kv_heads * s.head_dim_vo * s.cache_dtype.itemsize for s in specs)
            at_once = max(options.gather_together_bytes, torch.get_num_threads() * options.piece_bytes)
            self.scratch = (
                torch.empty(max(tokens * per_key, at_once), dtype=torch.uint8, device="cpu"),
                torch.empty(max(tokens * per_value, at_once), dtype=torch.uint8, device="cpu"),
            )

    def begin_forward(self, metadata: TorchMetadata) -> TorchStep:
        return TorchStep(metadata, self.scratch)

    def warm_up(self, progress: Progress | None = None) -> None:
        specs = [group.spec for group in self.groups]
        compile_listed(self.device, lambda: list_cache_writes(specs, self.cache), progress)

    def hold_inputs(self, max_batch_size: int, shared: GraphTensors | None) -> None:
        """Each size has buffers of its own: what graphs read is worked out of a batch, and lies in no step table."""


def _inputs(metadata: TorchMetadata) -> dict[str, torch.Tensor]:
    """What a graph reads of static metadata."""
    batch = metadata.decode_batch
    if batch is None or batch.bias is None or batch.live is None:
        raise ValueError("this metadata is for eager steps: build it with for_graph=True")
    return {"slot_mapping": metadata.slot_mapping, "slots": batch.slots, "bias": batch.bias, "live": batch.live}
