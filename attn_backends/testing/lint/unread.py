"""What a backend's code takes and does not read: options, parameters, attributes, fields of its metadata."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import BaseModel

from attn_backends.interface import AttentionMetadata, AttentionStep
from attn_backends.testing.harness import Backend
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.source import Module, Source, source_of

_AS_A_WHOLE = ("__dict__", "__iter__", "model_dump", "model_dump_json", "model_copy", "dict", "json", "copy")
_NOT_OPTIONS = frozenset({"spec", "cache", "common", "common_attn_metadata", "metadata", "limits", "group", "step",
                          "torch", "np", "math"})  # fmt: skip
_VIEWS = ("decode_fields", "prefill_fields")


@dataclass
class Trace:
    """Which options were read, of all that a backend was given."""

    model: type[BaseModel]
    read: set[str] = field(default_factory=set)

    def options(self) -> BaseModel:
        """The model's defaults, which note who reads them; they are of a subclass of the model."""
        names, read = frozenset(self.model.model_fields), self.read

        class Traced(self.model):  # type: ignore[name-defined,misc]
            def __getattribute__(self, name: str) -> Any:
                if name in names:
                    read.add(name)
                elif name in _AS_A_WHOLE and not _is_pydantics(sys._getframe(1).f_globals.get("__name__", "")):
                    read.update(names)
                return super().__getattribute__(name)

        made = Traced()
        read.clear()  # validators are no readers
        return made


def _is_pydantics(module: str) -> bool:
    return module.partition(".")[0] in ("pydantic", "pydantic_core", "copy", "functools")


def check_options(backend: Backend, trace: Trace | None) -> Iterator[Finding]:
    """Options that no step read, and that no line of the backend's names."""
    if trace is None:
        return
    named: set[str] = set()  # attributes that are read of what may be options, outside of the model itself
    for module in source_of(backend).reached:
        inside = _inside(module, lambda node: isinstance(node, ast.ClassDef) and node.name == trace.model.__name__)
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
                owner = node.value
                if getattr(owner, "attr", getattr(owner, "id", "")) not in _NOT_OPTIONS:
                    named.add(node.attr)
    for name in sorted(set(trace.model.model_fields) - trace.read - named):
        yield Finding("option-unread", f"{trace.model.__name__}.{name}", "no code reads it", "Use it, or remove it.")


def _inside(module: Module, is_outer: Callable[[ast.AST], bool]) -> set[int]:
    """Nodes of a module below some others, by `id`."""
    return {id(each) for node in module.nodes if is_outer(node) for each in ast.walk(node)}


def check_code(backend: Backend) -> Iterator[Finding]:
    """The backend's own modules, without running them."""
    source = source_of(backend)
    for module, node in source.classes():
        for name, at in _set_on_self(node):
            if name not in source.read:
                yield Finding("attribute-unread", f"{module.at(at)} {node.name}.{name}", "it is set, and read nowhere",
                              "Use it, or do not keep it.")  # fmt: skip
    yield from _fields(backend, source)
    yield from _parameters(source)


def _set_on_self(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for each in ast.walk(node):
        if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Store):
            continue
        if isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr, each


def _fields(backend: Backend, source: Source) -> Iterator[Finding]:
    """Fields of the metadata and the step, beyond the interface's, that nobody reads."""
    read: set[str] = set()  # outside of the views, which hand every field on
    for module in source.reached:
        views = _inside(module, lambda node: isinstance(node, ast.FunctionDef) and node.name in _VIEWS)
        read |= {node.attr for node in module.nodes if isinstance(node, ast.Attribute)
                 and isinstance(node.ctx, ast.Load) and id(node) not in views}  # fmt: skip
    for cls, base in (
        (backend.get_metadata_cls(), AttentionMetadata),
        (backend.get_impl_cls().step_cls, AttentionStep),
    ):
        own = {each.name for each in fields(cls)} - {each.name for each in fields(base)} - {"spec"}
        for name in sorted(own - read) if source.own else ():
            yield Finding("field-unread", f"{cls.__name__}.{name}", "nobody reads it", "Use it, or remove it.")


def _parameters(source: Source) -> Iterator[Finding]:
    """Parameters that a body does not read, of functions that have no namesake whose parameters they must share.

    A base's methods are left alone: hooks take what some subclass reads.
    """
    times = Counter(node.name for module in source.reached for node in module.nodes
                    if isinstance(node, ast.FunctionDef))  # fmt: skip
    given = _interface()
    for module in source.leaves:
        hooks = _inside(module, lambda node: isinstance(node, ast.ClassDef) and node.name in source.bases)
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef) or id(node) in hooks:
                continue
            is_free = times[node.name] == 1 and not node.decorator_list and node.name not in given and _does(node)
            if is_free or node.name == "__init__":
                yield from _unread(module, node)


def _interface() -> frozenset[str]:
    """Methods of the interface: a backend cannot choose their parameters."""
    from attn_backends import interface

    return frozenset(name for cls in vars(interface).values() if isinstance(cls, type) for name in dir(cls))


def _does(node: ast.FunctionDef) -> bool:
    """Whether it does anything, other than to have a docstring and raise."""
    return not all(
        isinstance(each, ast.Raise | ast.Pass) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in node.body
    )


def _unread(module: Module, node: ast.FunctionDef) -> Iterator[Finding]:
    read = {each.id for statement in node.body for each in ast.walk(statement)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}  # fmt: skip
    given = node.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        if each.arg not in read and each.arg not in ("self", "cls") and not each.arg.startswith("_"):
            yield Finding("parameter-unread", f"{module.at(node)} {node.name}({each.arg})", "the body does not read it",
                          "Use it, or remove it; with an underscore in front it is kept for callers.")  # fmt: skip
