"""A provider: a library that brings FlashAttention's kernels, with what it can do; and which one to take."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from attn_backends.backends.flash_attn.built import Kernels, Reader, kernels_in, narrowed
from attn_backends.backends.flash_attn.call import Call, LayerConstants, Rows, Tensors
from attn_backends.interface.capabilities import (
    HALF,
    Capabilities,
    CudaGraphSupport,
    Rejection,
    Unsupported,
    mismatches,
    reject_newer_gpu,
    reject_other_half,
)
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec

HEAD_DIMS = frozenset({64, 80, 96, 128, 192, 256})  # those of models; kernels take multiples of 8 up to 256

# What every provider can do. Sinks that kernels do not take join behind them, by the LSE.
COMMON = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    cache_dtypes=HALF,
    head_dims=HEAD_DIMS,
    layouts=frozenset({"NHD", "HND"}),
    attention_types=frozenset(AttentionType),
    window=True,
    soft_cap=True,
    sinks=True,
    non_causal=True,
    lse=True,
    cascade=True,
    cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
    min_compute_capability=(8, 0),
)


class ProviderError(ImportError):
    """A provider's library is not one that this backend knows: `known` says which are."""

    def __init__(self, found: str, known: str) -> None:
        super().__init__(f"{found}; this backend knows {known}")
        self.found, self.known = found, known


class Provider(ABC):
    """One library. It is imported when it is first asked for.

    Args:
        modules: what stands for the library's modules, by name; None to import them.
        built: the kernels that these were built with; None for all. Those of an imported library are read of its file.
    """

    name: ClassVar[str]  # in `backend_options`
    module_names: ClassVar[tuple[str, ...]]  # what it imports
    install: ClassVar[str]  # what to type
    newest_compute_capability: ClassVar[int | None] = None  # major
    decodes_apart: ClassVar[bool]  # whether a mixed batch's leading decodes are a call of their own
    sizes_by_table: ClassVar[bool] = False  # whether its kernels take a page table's width for the longest row there is
    max_sinks: ClassVar[int] = 0  # query heads that its kernels take sinks for
    kernel_dims: ClassVar[tuple[int, ...]] = ()  # head dims of kernels, ascending: a layer's is rounded up to one
    lends_keys: ClassVar[bool] = False  # whether a row without keys is lent one: the first of its first page
    compiles_when_called: ClassVar[bool] = False  # a kernel, by the first call that wants it
    read_kernels: ClassVar[Reader | None] = None  # what its file's names say; None: kernels are compiled when called

    def __init__(self, modules: dict[str, Any] | None = None, built: Kernels | None = None) -> None:
        self._given, self._built = modules, built

    @cached_property
    def modules(self) -> tuple[Any, ...]:
        """Imported and checked; raises whatever that raises."""
        given = self._given
        found = tuple(importlib.import_module(name) if given is None else given[name] for name in self.module_names)
        self.check(*found)
        return found

    @abstractmethod
    def check(self, *modules: Any) -> None:
        """Raise a `ProviderError` for a version that is not known."""

    def library_file(self) -> Path:
        """The compiled library whose kernels `read_kernels` finds."""
        raise NotImplementedError(f"{type(self).__name__} has no compiled library")

    @cached_property
    def built(self) -> Kernels | None:
        """The kernels that the library was built with; None where nothing limits them."""
        read = type(self).read_kernels
        if self._given is not None or read is None:
            return self._built
        return kernels_in(self.library_file(), read)

    def kernel_dim(self, head_dim: int) -> int | None:
        """The head dim of the kernel that runs layers of `head_dim`; None where that is too wide for any."""
        return next((dim for dim in self.kernel_dims if dim >= head_dim), None)

    def missing(self) -> Rejection | None:
        """Why its kernels cannot be had here; None if they can."""
        known = ", ".join(self.module_names)
        try:
            _ = self.modules
        except ProviderError as error:
            return Rejection("provider", error.found, error.known, f"Try: {self.install}")
        except ModuleNotFoundError as error:
            return Rejection("provider", f"no module {error.name!r}", known, f"Try: {self.install}")
        except Exception as error:  # a compiled library raises anything on import
            return Rejection("provider", f"{type(error).__name__}: {error}", known, f"Try: {self.install}")
        if self.built is not None and not self.built:
            got = f"{self.library_file()}, in which no name tells a kernel" if self._given is None else "no kernel"
            return Rejection("provider", got, "a library whose kernels can be told", f"Try: {self.install}")
        return None

    @abstractmethod
    def declared(self) -> Capabilities:
        """What its kernels honour, where all of them were built."""

    def capabilities(self) -> Capabilities:
        """What the kernels honour that were built; all of them where the library is not here."""
        if self.missing() is not None or self.built is None:
            return self.declared()
        return narrowed(self.declared(), self.built, self.kernel_dim)

    def why_not_pages_of(self, page_size: int) -> str:
        """What else to say where such pages are refused."""
        return ""

    def why_not_head_dim(self, head_dim: int) -> str:
        """What else to say where such a head dim is refused."""
        if self.built is None or head_dim not in (self.declared().head_dims or ()):
            return ""
        where = "its build" if self._given is not None else str(self.library_file())
        dims = ", ".join(map(str, sorted(self.capabilities().head_dims or ())))
        return f"{self.name} has no kernels for it: {where} holds those of {dims}."

    def reject(self, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device) -> list[Rejection]:
        """Every reason why it cannot serve such a layer here."""
        missing = self.missing()
        if missing is not None:
            return [missing]
        why = {"page_size": self.why_not_pages_of(cache.page_size), "head_dim": self.why_not_head_dim(spec.head_dim)}
        found = [
            replace(each, hint=f"{each.hint} {why.get(each.code, '')}".strip())
            for each in mismatches(self.capabilities(), spec, cache, device)
        ]
        found += reject_other_half(spec, "")
        if spec.alibi_slopes is not None and not spec.causal:
            found.append(Rejection("alibi", "alibi_slopes with causal=False", "causal layers", "Its bias is of the "
                                   "distance, whichever side the key is on: choose another backend."))  # fmt: skip
        newest = self.newest_compute_capability
        if newest is not None:
            found += reject_newer_gpu(device, newest, f"up to {newest}.x", "Use FlashAttention 2 there.")
        return found

    def schedule(
        self, spec: AttentionSpec, cache: KVCacheSpec, rows: Rows, *, causal: bool, split_keys: bool
    ) -> torch.Tensor | None:
        """A schedule of these rows for all layers of a step, made on the device; None where kernels have none."""
        return None

    def tot_seq_lens(self, spec: AttentionSpec, rows: Rows, *, causal: bool) -> torch.Tensor | None:
        """Lengths [R] i32 to tell kernels beside the rows' own, in all layers of a step; None: these are enough."""
        return None

    @abstractmethod
    def attend(self, given: Tensors, call: Call, layer: LayerConstants, want_lse: bool) -> torch.Tensor | None:
        """Attend. Returns the LSE, natural, [num_tokens, num_qo_heads] f32, infinite of either sign without keys."""


@dataclass(frozen=True)
class Choice:
    """The provider of some layers, and why better ones were passed over."""

    provider: Provider
    passed_over: tuple[tuple[str, tuple[Rejection, ...]], ...]

    @property
    def reason(self) -> str:
        passed = "; ".join(f"{name} was passed over: {rejections[0]}" for name, rejections in self.passed_over)
        return f"{self.provider.name}{': ' if passed else ''}{passed}"


def choose(
    providers: Sequence[Provider], spec: AttentionSpec, cache: KVCacheSpec, device: torch.device, wanted: str = "auto"
) -> Choice:
    """The first provider that serves a layer, or the wanted one.

    Raises:
        Unsupported: none does; with the reasons of each.
    """
    passed: list[tuple[str, tuple[Rejection, ...]]] = []
    for provider in providers:
        if wanted in ("auto", provider.name):
            rejections = tuple(provider.reject(spec, cache, device))
            if not rejections:
                return Choice(provider, tuple(passed))
            passed.append((provider.name, rejections))
    found = [replace(each, supported=f"{each.supported} ({name})") for name, reasons in passed for each in reasons]
    raise Unsupported("FLASH_ATTN", found)


def together(each: Sequence[Capabilities]) -> Capabilities:
    """What providers honour between them; not all of it at once."""
    return replace(
        COMMON,
        devices=frozenset().union(*(can.devices for can in each)),
        dtypes=frozenset().union(*(can.dtypes for can in each)),
        cache_dtypes=frozenset().union(*(can.cache_dtypes for can in each)),
        head_dims=_union([can.head_dims for can in each]),
        page_sizes=_union([can.page_sizes for can in each]),
        page_size_multiple=min(can.page_size_multiple for can in each),
        soft_cap=any(can.soft_cap for can in each),
        alibi=any(can.alibi for can in each),
        fp8_queries=any(can.fp8_queries for can in each),
        min_compute_capability=min(can.min_compute_capability or (0, 0) for can in each),
    )


def _union(sets: Sequence[frozenset[int] | None]) -> frozenset[int] | None:
    """None is any value."""
    known = [some for some in sets if some is not None]
    return frozenset().union(*known) if len(known) == len(sets) else None
