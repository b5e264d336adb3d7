"""A backend's own code, read and not run: the modules of its classes, and what they set, take and read."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from attn_backends.testing.harness import Backend

# Of this package a backend's code is what lies in these rooms; the others are the contract, or drive it.
_ROOMS = ("backends", "kernels", "batch", "cache", "step", "graphs")
_PACKAGE = "attn_backends"
_INTERFACE = tuple(f"attn_backends.interface.{name}" for name in ("backend", "metadata", "state", "impl", "plans"))


@dataclass(frozen=True)
class Module:
    """One file of a backend."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def read(self) -> frozenset[str]:
        """Names of attributes that its code reads, and what stands in strings."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        return frozenset(found)

    def at(self, node: ast.AST) -> str:
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True)
class Source:
    """The modules that a backend's classes and their bases are of, and those of its package that they import."""

    leaves: tuple[Module, ...]  # of the classes that the backend names
    own: tuple[Module, ...]  # and of their bases below the interface
    reached: tuple[Module, ...]  # and what these import, at any depth
    bases: frozenset[str]  # names of the bases: a subclass elsewhere may read what they hand to their hooks

    @cached_property
    def read(self) -> frozenset[str]:
        """Names of attributes that some code reads, the interface's too, or names in a string, as `getattr` does."""
        interface = filter(None, (_load(name) for name in _INTERFACE))
        return frozenset(name for module in (*self.reached, *interface) for name in module.read)

    def classes(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        for module in self.own:
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    yield module, node


@cache
def source_of(backend: Backend) -> Source:
    """A backend's code. What has no source, as a compiled module, is left out."""
    state_cls, impl_cls = backend.get_state_cls(), backend.get_impl_cls()
    named = [backend, backend.get_metadata_cls(), backend.get_builder_cls(), state_cls, impl_cls, impl_cls.step_cls]
    classes = named + ([state_cls.graph_cls] if state_cls.graph_cls else [])
    names = list(dict.fromkeys(base.__module__ for cls in classes for base in cls.__mro__ if _is_own(base.__module__)))
    own = [module for name in names if (module := _load(name)) is not None]
    leaves = [module for module in own if module.name in {cls.__module__ for cls in classes}]
    reached = {module.name: module for module in own}
    waiting = list(own)
    while waiting:
        for name in _imports(waiting.pop(), names):
            if name not in reached and (module := _load(name)) is not None:
                reached[name] = module
                waiting.append(module)
    bases = frozenset(base.__name__ for cls in classes for base in cls.__mro__[1:])
    return Source(tuple(leaves), tuple(own), tuple(reached.values()), bases)


def _is_own(module: str) -> bool:
    package, *rooms = module.split(".")
    if package == _PACKAGE:
        return bool(rooms) and rooms[0] in _ROOMS
    return package not in ("builtins", "abc", "typing", "torch", "pydantic", "enum", "collections")


@cache
def _load(name: str) -> Module | None:
    try:
        spec = find_spec(name)
        path = Path(spec.origin or "") if spec else Path(inspect.getfile(__import__(name)))
        return Module(name, path, ast.parse(path.read_text(), str(path))) if path.suffix == ".py" else None
    except (ImportError, OSError, SyntaxError, TypeError, ValueError):
        return None


def _imports(module: Module, own: Iterable[str]) -> Iterator[str]:
    """What a module imports of the packages that the backend's classes are of."""
    packages = {name.partition(".")[0] for name in own}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = module.name.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in packages and _is_own(name))
