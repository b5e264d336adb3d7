"""FlashMLA itself, as this backend calls it: who brings it, and the two generations of its schedules.

The kernel splits rows among the multiprocessors by a schedule that fits one set of lengths. Older releases make it in
`get_mla_metadata`, which is asked with the lengths. Newer ones give an empty object there, and the first call of the
kernel fills it on the device: the launch that does so is part of that call. It takes as long as the attention of a
short batch, so in graphs a launch of ours fills it again (`schedule`).
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.machine import HAS_TRITON

# What `provider` says, and the module behind it. The first that imports is taken.
PROVIDERS = {
    "flash_mla": "flash_mla",
    "vllm": "vllm.third_party.flashmla.flash_mla_interface",
    "sgl_kernel": "sgl_kernel.flash_mla",
}
FP8 = torch.float8_e4m3fn
# Where else than in its module a provider has the two functions for latents of fp8 (dense ones: vLLM's addition).
FP8_HOMES = {"vllm": "vllm.v1.attention.ops.flashmla"}


class Fp8Functions(NamedTuple):
    """Decode over latents of `FP8` by queries of the same, on schedules that are made in advance."""

    get_mla_metadata: Callable[..., Any]
    flash_mla_with_kvcache: Callable[..., Any]


class Kernels:
    """What one provider brings.

    Args:
        module: with `get_mla_metadata` and `flash_mla_with_kvcache`.
        fp8: the functions for latents of fp8; None: it has none, unless the module has them.

    Attributes:
        fills_schedules: the newer generation, of 16-bit latents.
    """

    def __init__(self, module: Any, fp8: Fp8Functions | None = None) -> None:
        self.name = str(module.__name__)
        self.fp8 = fp8_functions(module) or fp8
        self.get_mla_metadata = module.get_mla_metadata
        self.flash_mla_with_kvcache = module.flash_mla_with_kvcache
        self.fills_schedules = "cache_seqlens" not in inspect.signature(self.get_mla_metadata).parameters
        self._writes_out = "out" in inspect.signature(self.flash_mla_with_kvcache).parameters

    def of_fp8(self) -> Fp8Functions:
        """The functions for latents of fp8.

        Raises:
            RuntimeError: there are none: the backend's `reject` says so before.
        """
        if self.fp8 is None:
            raise RuntimeError(f"{self.name} has no dense decode over latents of fp8: leave cache.dtype out")
        return self.fp8

    def new_schedule(self) -> Any:
        """An empty one, of the newer generation."""
        return self.get_mla_metadata()[0]

    def can_refill(self, device: torch.device) -> bool:
        """Whether a launch of ours makes the schedules that the newer generation fills. It is called to find out."""
        if not self.fills_schedules or device.type != "cuda" or not HAS_TRITON:
            return False
        from attn_backends.backends.mla.flashmla.schedule import is_known

        return is_known(self.flash_mla_with_kvcache, self.new_schedule, device)

    def run(
        self,
        query: torch.Tensor,  # [num_rows, query_len, num_qo_heads, 576]
        latent_cache: torch.Tensor,  # [num_pages, 64, 576]
        page_table: torch.Tensor,  # [num_rows, max_pages] i32
        seq_lens: torch.Tensor,  # [num_rows] i32
        schedule: tuple[Any, Any],
        scale: float,
        output: torch.Tensor,  # [num_rows, query_len, num_qo_heads, 512], written in place
        descales: tuple[torch.Tensor, torch.Tensor] | None = None,  # of queries and latents of fp8, [1] f32 each
    ) -> torch.Tensor:
        """Returns the LSE [num_rows, num_qo_heads, query_len] f32, natural log, +inf for a row without keys.

        Over fp8 the kernel's own output is bfloat16, whatever the layer's dtype.
        """
        functions: Kernels | Fp8Functions = self
        given: dict[str, torch.Tensor] = {}
        if descales is not None:
            functions, given = self.of_fp8(), {"descale_q": descales[0], "descale_k": descales[1]}
        elif self._writes_out:
            # The kernel takes all of a row's queries as those of its one KV head, whatever its docstring says of `out`.
            given["out"] = output.view(len(output), 1, -1, output.shape[-1])
        made, lse = functions.flash_mla_with_kvcache(
            query, latent_cache.unsqueeze(2), page_table, seq_lens, output.shape[-1], *schedule,
            softmax_scale=scale, causal=True, **given,
        )  # fmt: skip
        if "out" not in given:
            output.copy_(made)
        return lse  # type: ignore[no-any-return]


def fp8_functions(module: Any) -> Fp8Functions | None:
    """The functions of a module for latents of fp8, if it has both."""
    make, decode = (
        getattr(module, f"{name}_fp8", None) for name in ("get_mla_metadata_dense", "flash_mla_with_kvcache")
    )
    return None if make is None or decode is None else Fp8Functions(make, decode)


def _fp8_elsewhere(name: str) -> Fp8Functions | None:
    """A provider's functions for fp8 that are not in its module; None: it has none, or they do not import."""
    try:
        return fp8_functions(importlib.import_module(FP8_HOMES[name])) if name in FP8_HOMES else None
    except Exception:  # as below: then there is no fp8, and `reject` says so
        return None


def load_kernels(provider: str = "auto") -> Kernels:
    """The kernels of a provider, or of the first that imports.

    Raises:
        ModuleNotFoundError: none is installed.
        ImportError: one is installed and cannot be imported; the reasons of all are in the message.
    """
    names = list(PROVIDERS) if provider == "auto" else [provider]
    errors: dict[str, Exception] = {}
    for name in names:
        try:
            return Kernels(importlib.import_module(PROVIDERS[name]), _fp8_elsewhere(name))
        except Exception as error:  # kernel libraries raise anything on import: OSError, RuntimeError, …
            errors[name] = error
    absent = {name for name, error in errors.items() if isinstance(error, ModuleNotFoundError)}
    reasons = "; ".join(
        f"{name}: {error}" if name in absent else f"{name}: {type(error).__name__}: {error}"
        for name, error in errors.items()
    )
    raise (ModuleNotFoundError if len(absent) == len(names) else ImportError)(
        f"no provider of FlashMLA imports ({reasons})"
    )


class Schedule(ABC):
    """How the kernel splits some rows, for all layers of a plan group."""

    zeroes_idle_rows: ClassVar[bool] = True  # the kernel gives zeros, and an LSE of +inf, to rows without keys

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def plan(self, rows: DecodeRows, num_qo_heads: int) -> None:
        """The rows have new lengths."""

    @abstractmethod
    def of(self, layer: object) -> tuple[Any, Any]:
        """`tile_scheduler_metadata` and `num_splits` for a layer's call."""

    def seq_lens(self, rows: DecodeRows) -> torch.Tensor:
        """[num_rows] i32: the lengths that a layer's call is given."""
        return rows.seq_lens

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[num_sm_parts, 8] and [num_rows + 1] i32, as the kernel reads them; None before there are any."""


class MadeSchedule(Schedule):
    """The older generation's, and that of fp8: made by the state, and refilled where it lies when lengths change.

    Their kernels take a page whose id stands in front of a row's own where the row has no key, and divide by a sum that
    they did not set (`n_block` is -1 in `flash_fwd_mla_kernel.h`). So padded rows are lent a key, of page 0, and their
    outputs are set by the impl.
    """

    zeroes_idle_rows = False

    def __init__(self, kernels: Kernels, get_mla_metadata: Callable[..., Any] | None = None) -> None:
        super().__init__(kernels)
        self.get_mla_metadata = get_mla_metadata or kernels.get_mla_metadata
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None
        self._lens: torch.Tensor | None = None  # [num_rows] i32, at least 1, of a graph's rows

    def plan(self, rows: DecodeRows, num_qo_heads: int) -> None:
        if rows.idle is not None:
            self._lens = torch.clamp(rows.seq_lens, min=1, out=self._lens)
        made = self.get_mla_metadata(self.seq_lens(rows), rows.query_len * num_qo_heads, 1)
        if self._made is None:
            self._made = made[0], made[1]
        else:  # their shapes follow from the size of a graph
            for held, new in zip(self._made, made, strict=True):
                held.copy_(new)

    def of(self, layer: object) -> tuple[Any, Any]:
        assert self._made is not None  # the state plans first
        return self._made

    def seq_lens(self, rows: DecodeRows) -> torch.Tensor:
        return rows.seq_lens if self._lens is None else self._lens

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._made or (None, None)


class _HeldSchedule(Schedule):
    """An object of the newer generation, which a call of the kernel fills."""

    _held: Any = None
    _first: object = None  # the layer that filled it: where it comes again, a pass over the layers begins

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return getattr(self._held, "tile_scheduler_metadata", None), getattr(self._held, "num_splits", None)

    def fill_by(self, layer: object) -> None:
        """A layer's call fills an empty one."""
        self._held, self._first = self.kernels.new_schedule(), layer


class FilledSchedule(_HeldSchedule):
    """The newer generation's: the first layer's call fills it, the others find it filled.

    A graph must fill it at every replay, so the launch that does must be captured: `in_graph`, every pass over the
    layers begins with an empty one.
    """

    def __init__(self, kernels: Kernels, in_graph: bool) -> None:
        super().__init__(kernels)
        self.in_graph = in_graph

    def plan(self, rows: DecodeRows, num_qo_heads: int) -> None:
        self._held = self._first = None

    def of(self, layer: object) -> tuple[Any, Any]:
        if self._held is None or (self.in_graph and layer is self._first):
            self.fill_by(layer)
        return self._held, None


class RefilledSchedule(_HeldSchedule):
    """The newer generation's in a graph: the first call fills it, and every later pass over the layers begins with a
    launch of ours that fills it again. The first pass warms up, so that the graph has the launch of ours."""

    _seq_lens: torch.Tensor | None = None

    def plan(self, rows: DecodeRows, num_qo_heads: int) -> None:
        self._seq_lens = rows.seq_lens

    def of(self, layer: object) -> tuple[Any, Any]:
        from attn_backends.backends.mla.flashmla.schedule import fill

        if self._held is None:
            self.fill_by(layer)
        elif layer is self._first:
            assert self._seq_lens is not None  # the state plans first
            fill(self._seq_lens, self._held.tile_scheduler_metadata, self._held.num_splits)
        return self._held, None
