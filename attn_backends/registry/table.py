"""The table behind the registry: which backends are known, and how one is imported. Rows are data, nothing is imported.

Known? `backends`. Importable? `get_backend(name)`. Fit for these layers? `attn_backends.registry`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal

from attn_backends.registry.phases import phased_name, phases_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from attn_backends.interface import AttentionBackend

logger = logging.getLogger(__name__)

AUTO = "AUTO"  # asks the registry to choose; no backend has this name
ENTRY_POINT: Final = "entry point"
GROUP = "attn_backends.backends"  # of entry points: name = "package.module:Class"


@dataclass(frozen=True)
class BackendEntry:
    """One row: where a backend lives, and what to type if it is missing."""

    name: str  # upper case
    target: str  # "package.module:Class"
    package: str | None = None  # distribution that brings the kernels, for its version
    install: str | None = None  # command that makes it importable
    priority: int | None = None  # AUTO tries the highest first, and never a backend without one
    options: type[BaseModel] | str | None = None  # pydantic model of its `backend_options`, or "package.module:Class"
    source: Literal["built-in", "entry point", "registered"] = "registered"
    # The kernels' module, imported with the backend, or several of which any will do. None: its target imports them.
    module: str | tuple[str, ...] | None = None
    probe: str | None = None  # "package.module:function" that raises where nobody brings them


def _built_in(
    name: str, classes: str, priority: int, package: str | None = None, install: str | None = None,
    module: str | tuple[str, ...] | None = None, options: str = "options", probe: str | None = None,
) -> BackendEntry:  # fmt: skip
    """The row of a backend of this package, which lives in the folder of its name.

    Args:
        classes: how the names of its classes begin.
        options: the module of its options in that folder.
        probe: "module:function" in that folder.
    """
    folder = f"attn_backends.backends.{'mla.' if name.endswith('MLA') else ''}{name.lower()}"
    return BackendEntry(
        name, f"{folder}.backend:{classes}Backend", package, install or f"pip install {package}", priority,
        f"{folder}.{options}:{classes}Options", "built-in", module, probe and f"{folder}.{probe}",
    )  # fmt: skip


_FLASH_ATTN = ("flash_attn", "flash_attn_interface", "vllm.vllm_flash_attn.flash_attn_interface")
_FLASHMLA = "pip install git+https://github.com/deepseek-ai/FlashMLA, or vllm, or sgl-kernel"
BUILT_IN = (
    _built_in("TORCH", "Torch", 0, "torch"),
    _built_in("TRITON", "Triton", 8, "triton", options="tuning"),
    _built_in("FLASHINFER", "FlashInfer", 10, "flashinfer-python", module="flashinfer"),
    _built_in("FLASH_ATTN", "FlashAttn", 5, "flash-attn", "pip install flash-attn --no-build-isolation", _FLASH_ATTN),
    _built_in("FLASHINFER_MLA", "FlashInferMLA", 20, "flashinfer-python", module="flashinfer"),
    _built_in("FLASHMLA", "FlashMLA", 10, install=_FLASHMLA, probe="library:load_kernels"),
    _built_in("TORCH_MLA", "TorchMLA", 0, "torch"),
    _built_in("TRITON_MLA", "TritonMLA", 7, "triton", options="tuning"),
    _built_in("FLASH_ATTN_MLA", "FlashAttnMLA", 5, "vllm", probe="library:load"),
)


class UnknownBackendError(ValueError):
    """No backend has this name; the message has the nearest names."""


class BackendImportError(ImportError):
    """A known backend cannot be imported. `reason` says why, `fix` what to type; the cause is chained."""

    def __init__(self, backend: str, reason: str, fix: str) -> None:
        super().__init__(backend, reason, fix)
        self.backend, self.reason, self.fix = backend, reason, fix

    def __str__(self) -> str:
        return f"backend {self.backend} cannot be imported: {self.reason}. Try: {self.fix}"


class BackendTable(Mapping[str, BackendEntry]):
    """Read-only view of all rows, built-in, installed and registered, by name in any case."""

    def __getitem__(self, name: str) -> BackendEntry:
        return _rows()[str(name).upper()]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(_rows()))

    def __len__(self) -> int:
        return len(_rows())

    def __repr__(self) -> str:
        return f"<backends: {', '.join(self)}>"


backends = BackendTable()
_classes: dict[str, type[AttentionBackend]] = {}  # imported, by name


@functools.cache
def _rows() -> dict[str, BackendEntry]:
    """The table itself. Installed entry points are read once, on first use; the first row of a name stays."""
    rows = {entry.name: entry for entry in BUILT_IN}
    for entry in _installed_entries():
        known = rows.setdefault(entry.name, entry)
        if entry.name == AUTO or known.target != entry.target:
            taken = "is reserved" if entry.name == AUTO else f"is {known.target} ({known.source})"
            logger.warning("entry point %s = %s of %s: the name %s", entry.name, entry.target, entry.package, taken)
    rows.pop(AUTO, None)
    return rows


def _installed_entries() -> Iterator[BackendEntry]:
    """Entry points as strings. One distribution at a time: one with broken metadata must not hide the others."""
    for dist in importlib.metadata.distributions():
        try:
            points = [(point.name, point.value) for point in dist.entry_points if point.group == GROUP]
            package = dist.metadata["Name"] if points else None
        except Exception as error:
            logger.warning("entry points of %s cannot be read: %r", getattr(dist, "_path", dist), error)
            continue
        for name, value in points:
            yield BackendEntry(name.upper(), value.strip(), package, f"pip install {package}", source=ENTRY_POINT)


def get_entry(name: str) -> BackendEntry:
    """The row of a name, or one made for two names. Raises `UnknownBackendError`, a `ValueError`, with the nearest."""
    if phases := phases_of(str(name)):
        prefill, decode = (get_entry(phase).name for phase in phases)
        pair = phased_name(prefill, decode)
        return backends[decode] if prefill == decode else BackendEntry(pair, f"{__name__}:{pair}")
    if name in backends:
        return backends[name]
    if str(name).upper() == AUTO:
        raise UnknownBackendError(
            f"{AUTO} chooses a backend, and is none: attn-backends explain says which; name one of "
            f"{', '.join(backends)}"
        )
    near = get_close_matches(str(name).upper(), backends, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UnknownBackendError(f"no backend is named {name!r}; {hint}known: {', '.join([AUTO, *backends])}")


def get_backend(name: str) -> type[AttentionBackend]:
    """Import a backend by name.

    Raises:
        UnknownBackendError: a `ValueError`; no such name.
        BackendImportError: an `ImportError`; whatever its import raised, or what its class lacks, and what to type.
    """
    entry = get_entry(name)
    if entry.name not in _classes:  # nor is a pair's, whose parts may be registered anew
        try:
            if entry.module:
                _import_any((entry.module,) if isinstance(entry.module, str) else entry.module)
            if entry.probe:
                import_target(entry.probe)()
            backend = get_class(entry)
        except Exception as error:  # kernel libraries raise anything on import: AssertionError, OSError, …
            raise _import_error(entry, error) from error
        if entry.name not in backends:
            return backend
        _classes[entry.name] = backend
    return _classes[entry.name]


def __getattr__(name: str) -> Any:
    """The class of a pair, under its name, by which it pickles."""
    if not (phases := phases_of(name)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attn_backends.interface.phased_backend import phased_backend  # it loads torch

    return phased_backend(*map(get_backend, phases), __name__, name)


def _import_any(modules: tuple[str, ...]) -> None:
    """Import the first that can be imported; if none can, raise what is wrong with one that is installed."""
    errors: list[Exception] = []
    for module in modules:
        try:
            importlib.import_module(module)
            return
        except Exception as error:
            errors.append(error)
    broken = [error for error in errors if not isinstance(error, ModuleNotFoundError)]
    if broken or len(errors) == 1:
        raise (broken or errors)[0]
    raise ModuleNotFoundError(f"none of the modules {', '.join(modules)} is installed")


def get_class(entry: BackendEntry) -> type[AttentionBackend]:
    """A row's class, whether or not its kernels (`BackendEntry.module`, `probe`) are installed."""
    backend: type[AttentionBackend] = import_target(entry.target)
    check_class(entry.name, backend)
    return backend


def check_class(name: str, backend: object) -> None:
    """Refuse what is no complete backend, has another name, or was written for another contract.

    Raises:
        TypeError: says which.
        ContractMismatch: an `ImportError`; says what changed.
    """
    from attn_backends.interface import AttentionBackend, check_contract  # it loads torch

    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise TypeError(f"{backend!r} is not a subclass of attn_backends.AttentionBackend")
    check_contract(f"{backend.__module__}:{backend.__qualname__}", getattr(backend, "contract", None))
    if missing := backend.missing():
        raise TypeError(f"{backend.__qualname__} lacks {', '.join(missing)}: a backend sets them on its class")
    if backend.get_name() != name:
        raise TypeError(f"{backend.__qualname__}.get_name() is {backend.get_name()!r}; it is registered as {name!r}")


def import_target(target: str) -> Any:
    """The object that "package.module:Name" names."""
    module, _, qualname = target.partition(":")
    if not module or not qualname:
        raise ValueError(f"target {target!r} must be 'package.module:Class'")
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


def _import_error(entry: BackendEntry, error: Exception) -> BackendImportError:
    if isinstance(error, ImportError) and hasattr(error, "fix"):  # a ContractMismatch, whose module loads torch
        who, reason, fix = error.args
        return BackendImportError(entry.name, f"{who} {reason}", fix)
    fix = entry.install or f'python -c "import {entry.target.partition(":")[0]}"'
    if isinstance(error, ModuleNotFoundError):
        reason = f"module {error.name!r} is not installed" if error.name else str(error)
        return BackendImportError(entry.name, reason, fix)
    return BackendImportError(entry.name, f"{type(error).__name__}: {error}".strip().rstrip(":."), fix)


def installed_version(package: str) -> str | None:
    """The version of a distribution; None for one that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def put(entry: BackendEntry, backend: type[AttentionBackend] | None) -> None:
    """Set a name's row, and its class if that is imported already."""
    known = _rows().get(entry.name)
    _rows()[entry.name] = entry
    if backend is not None:
        _classes[entry.name] = backend
    elif known and known.target != entry.target:
        _classes.pop(entry.name, None)
