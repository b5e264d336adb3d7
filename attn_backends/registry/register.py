"""`register_backend`: a row that a program or an installed plugin adds to the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from attn_backends.registry.table import AUTO, ENTRY_POINT, BackendEntry, backends, check_class, put

if TYPE_CHECKING:
    from pydantic import BaseModel

    from attn_backends.interface import AttentionBackend

_NO_NAME = frozenset("=,")  # a pair of backends has them in its name
TargetT = TypeVar("TargetT", bound="str | type[AttentionBackend]")


def register_backend(
    name: str,
    target: str | type[AttentionBackend] | None = None,
    *,
    package: str | None = None,
    install: str | None = None,
    priority: int | None = None,
    options: type[BaseModel] | str | None = None,
    override: bool = False,
) -> Callable[[TargetT], TargetT]:
    """Add a backend: `register_backend("MINE", "pkg.mod:Class")`, with a class, or `@register_backend("MINE")` on one.

    Registering the same target twice changes nothing. A class that an installed entry point names may be decorated
    too: that completes the entry point's row, which has no other way to state its priority and options.

    Args:
        name: any case; stored in upper case, and what the class's `get_name()` returns.
        target: "package.module:Class", imported on first use, or the class itself.
        package: distribution that brings the kernels, for `attn-backends list`.
        install: command shown when the import fails.
        priority: AUTO tries the highest first (TORCH is 0); without one it is used only by name.
        options: pydantic model that the config's `backend_options` are validated by, or where to import it from.
        override: replace another target, or what else is stated, of this name.

    Returns:
        The class decorator; of no further use when `target` is given.

    Raises:
        ValueError: the name is reserved, or has another target.
        TypeError: the class is not a complete backend, or calls itself by another name.
        ContractMismatch: an `ImportError`; the class was written for another contract, or does not say for which.
    """

    def register(target: TargetT) -> TargetT:
        backend = None if isinstance(target, str) else target
        where = f"{target.__module__}:{target.__qualname__}" if isinstance(target, type) else str(target)
        _add(BackendEntry(name.upper(), where, package, install, priority, options), backend, override)
        return target

    if target is not None:
        register(target)
    return register


def _add(entry: BackendEntry, backend: type[AttentionBackend] | None, override: bool) -> None:
    if entry.name in ("", AUTO) or not _NO_NAME.isdisjoint(entry.name):
        raise ValueError(f"a backend cannot be named {entry.name!r}; choose another name, without = and ,")
    if backend is not None:
        _check(entry, backend)
    known = backends.get(entry.name)
    if known and _same_plugin(known, entry):
        entry = _completed(known, entry)
    elif known and not override:
        if known.target != entry.target:
            raise ValueError(
                f"backend {entry.name} is {known.target} ({known.source}); pass override=True to make it {entry.target}"
            )
        entry = known
    put(entry, backend)


def _check(entry: BackendEntry, backend: type[AttentionBackend]) -> None:
    """`check_class`; an installed plugin of another contract keeps what it states, so that AUTO has the reason."""
    try:
        check_class(entry.name, backend)
    except ImportError:
        known = backends.get(entry.name)
        if known and _same_plugin(known, entry):
            put(_completed(known, entry), None)
        raise


def _completed(known: BackendEntry, entry: BackendEntry) -> BackendEntry:
    """A row, and what another states of the same plugin."""
    return replace(known, **{key: value for key, value in vars(entry).items() if value is not None and key != "source"})


def _same_plugin(known: BackendEntry, entry: BackendEntry) -> bool:
    """Whether an entry point's row is meant: its target may be a re-export in another module of the package."""
    (module, _, qualname), (other_module, _, other_qualname) = (e.target.partition(":") for e in (known, entry))
    same = module.partition(".")[0] == other_module.partition(".")[0] and qualname == other_qualname
    return known.source == ENTRY_POINT and same
