"""Operators of ours that graphs of torch.compile call without Python."""

from __future__ import annotations

from typing import Any


class CShims(dict[Any, list[str]]):
    """Operators that graphs can call without Python, with their declarations in C.

    Pickles as the declarations alone: torch's cache of graphs takes its settings into a graph's key, and operators have
    no form that lasts.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (sorted(each for declared in self.values() for each in declared),)

    def __deepcopy__(self, memo: object) -> CShims:
        return self


def c_shims() -> CShims:
    return CShims(declarations)


declarations: dict[Any, list[str]] = {}
