"""Packages that SGLang imports at its top, and a machine without a GPU has not: empty ones, made when asked for.

Whatever is looked up in them is a class that can be called, indexed, subclassed and used as a decorator, and does
nothing. Attention and pools of SGLang's on a CPU use none of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

ABSENT = {
    "anthropic", "av", "blobfile", "compressed_tensors", "cuda", "cutlass", "datasets", "decord", "deep_gemm",
    "flashinfer", "kernels", "llguidance", "modelscope", "mooncake", "openai_harmony", "outlines",
    "pynvml", "quack", "sgl_kernel", "soundfile", "tilelang", "timm", "torch_memory_saver", "torchao", "torchaudio",
    "torchvision", "tvm_ffi", "xgrammar",
}  # fmt: skip


def _attribute(name: str) -> type[Nothing]:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)  # Python asks what a thing can do: nothing
    return Nothing


class _Kind(type):
    def __getattr__(cls, name: str) -> type[Nothing]:
        return _attribute(name)

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Nothing(metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Nothing and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # as a decorator
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Nothing()

    def __getattr__(self, name: str) -> type[Nothing]:
        return _attribute(name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(ModuleType):
    __version__ = "99.0"
    __path__: list[str] = []  # noqa: RUF012 (a package, as modules are)

    def __getattr__(self, name: str) -> type[Nothing]:
        return _attribute(name)


class _Operators:
    """Its kernels for CPUs, which are compiled apart; no other operator is there."""

    def __getattr__(self, name: str) -> type[Nothing]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)
        return Nothing


class _Maker(importlib.abc.Loader, importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """Behind every other place that modules are found in: what is here is taken as it is."""
    sys.meta_path.append(_Maker())
    torch.ops.sgl_kernel = _Operators()
