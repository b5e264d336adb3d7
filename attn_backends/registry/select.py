"""Which backend serves these layers on this device, and why. Importing it loads no kernel library.

Known? `backends`. Importable? `get_backend`. Fit? `select_backend` and `explain`. The rows are in `table`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_backends.registry.measured import Load, Measured, fastest_first, nearest, unmeasured, with_pairs
from attn_backends.registry.options import validate_options
from attn_backends.registry.table import (
    AUTO,
    ENTRY_POINT,
    BackendEntry,
    BackendImportError,
    backends,
    get_backend,
    get_class,
    get_entry,
)
from attn_backends.registry.user_table import AGAIN, read_table, table_path
from attn_backends.registry.verdicts import Explanation, LayerRejection, Selection, Verdict

if TYPE_CHECKING:
    import torch

    from attn_backends.interface import AttentionBackend
    from attn_backends.interface.capabilities import Rejection
    from attn_backends.spec import AttentionSpec, KVCacheSpec, PlanGroup

    Specs = Mapping[Any, AttentionSpec] | Iterable[AttentionSpec]  # by layer, or in order; equal ones are asked once
    Groups = tuple[PlanGroup[Any], ...]
    Caches = KVCacheSpec | Sequence[KVCacheSpec]  # several: the first that a backend serves is the one to use


logger = logging.getLogger(__name__)


def select_backend(
    name: str, specs: Specs, cache: Caches, device: torch.device | str, load: Load | None = None,
    options: Mapping[str, Any] | None = None,
) -> Selection:  # fmt: skip
    """The backend to run these layers with. A named one is used or refused; only AUTO chooses.

    AUTO takes the first by priority that serves every layer, and logs why it passed over each earlier one. On the GPU
    that backends were measured on, those trade places by their times for such layers and load. Its candidates are the
    MLA family where all layers are MLA, and all others where none is.

    Args:
        cache: what the pool is, or what it may be, best first: `Selection.cache` is the first that the backend serves,
            its `preferred_page_sizes` before all others.
        load: what decode steps will be; None: some requests of some thousand keys.
        options: `backend_options` of a named backend, which may rule out what it serves without. AUTO asks without any.

    Raises:
        UnknownBackendError: no backend has this name.
        BackendImportError: the named backend cannot be imported, and would serve such layers on such a device.
        ConfigError: the named backend does not take these options.
        Unsupported: the named backend, or with AUTO every backend, refuses; the rejections say why.
        ValueError: there is no layer to serve, or no cache.
    """
    groups, is_auto = _groups(specs), _is_auto(name)
    verdicts: list[Verdict] = []
    measured = _measured(name, groups, device, load)
    for entry in _auto_entries(measured) if is_auto else [get_entry(name)]:
        verdict = _verdict(entry, groups, cache, device, {} if is_auto else options)
        verdicts.append(verdict)
        if verdict.cache is not None:
            asked = [verdict for verdict in verdicts if verdict.is_candidate]
            reason = _reason(name, asked, measured, device, groups)
            return Selection(entry.name, get_backend(entry.name), verdict.cache, tuple(asked), reason)
        if verdict.import_error and not is_auto:
            get_backend(name)  # raises: only with AUTO a missing package is a verdict
        if is_auto and not verdict.is_candidate:
            continue
        logger.info("%s passed over %s: %s", name.upper(), entry.name, "; ".join(verdict.reasons))
    raise _refusal(name, verdicts)


def explain(
    name: str, specs: Specs, cache: Caches, device: torch.device | str, load: Load | None = None,
    options: Mapping[str, Any] | None = None,
) -> Explanation:  # fmt: skip
    """What `select_backend` would do and why, with every known backend's verdict. Imports all of them.

    Raises:
        UnknownBackendError: no backend has this name.
        ConfigError, ValueError: as there.
    """
    asked, groups = AUTO if _is_auto(name) else get_entry(name).name, _groups(specs)
    entries = dict(backends) if asked == AUTO else {**backends, asked: get_entry(asked)}
    verdicts = {
        name: _verdict(entry, groups, cache, device, options if name == asked else {})
        for name, entry in entries.items()
    }
    measured = _measured(name, groups, device, load)
    order = _auto_entries(measured) if asked == AUTO else [get_entry(asked)]
    verdicts |= {each.name: _verdict(each, groups, cache, device, {}) for each in order if each.name not in verdicts}
    tried = [verdicts[entry.name] for entry in order]
    usable = [verdict for verdict in tried if verdict.usable]
    if not usable:
        return Explanation(asked, tuple(verdicts.values()), None, str(_refusal(asked, tried)))
    passed = [verdict for verdict in tried[: tried.index(usable[0]) + 1] if verdict.is_candidate]
    return Explanation(
        asked, tuple(verdicts.values()), usable[0].name, _reason(asked, passed, measured, device, groups)
    )


def explain_for(
    name: str, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str,
    options: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Every reason why a backend cannot serve such a layer here, in words; empty if it can. Only this one is imported.

    Raises:
        UnknownBackendError: no backend has this name.
        ConfigError: it does not take these options.
    """
    verdict = _verdict(get_entry(name), _groups([spec]), cache, device, options)
    return verdict.reasons if verdict.import_error else [str(found.rejection) for found in verdict.rejections]


def auto_order(device: torch.device | str) -> str:
    """What AUTO orders backends by on a device, in words."""
    from attn_backends.machine import device_name  # it loads torch

    own, gpu = read_table(device_name(device)), _gpu_name(device)
    if own is not None and not (stale := own.stale()):
        return (
            f"by times that attn-backends bench measured on {own.device} ({own.date}; {table_path(own.device)}) for "
            "the nearest layers and load, else by priority"
        )
    told = f"; the times in {table_path(own.device)} are stale: {stale}. To use them, {AGAIN}" if own else ""
    why = unmeasured(gpu)
    if gpu is None or why:
        return (f"by priority ({why})" if why else "by priority") + told
    return f"by times measured on {gpu} for the nearest layers and load, else by priority{told}"


def _gpu_name(device: torch.device | str) -> str | None:
    from attn_backends.machine import gpu_name  # it loads torch

    return gpu_name(device)


def _measured(name: str, groups: Groups, device: torch.device | str, load: Load | None) -> Measured | None:
    """What AUTO orders backends of a device by: the user's own times if they are not stale, else shipped ones."""
    if not _is_auto(name):
        return None
    from attn_backends.machine import device_name  # it loads torch

    own = read_table(device_name(device))
    if own is not None and (stale := own.stale()):
        logger.warning("%s: the times in %s are stale (%s): %s", AUTO, table_path(own.device), stale, AGAIN)
        own = None
    found = own.measured(groups, load or Load()) if own is not None else None
    return found or nearest(groups, load or Load(), _gpu_name(device))


def _auto_entries(measured: Measured | None) -> list[BackendEntry]:
    """AUTO's order. Installed plugins are imported first: only their code states a priority."""
    for entry in [entry for entry in backends.values() if entry.source == ENTRY_POINT]:
        try:
            get_backend(entry.name)
        except BackendImportError as error:
            logger.warning("%s", error)
    ranked = [(entry.priority, entry) for entry in backends.values() if entry.priority is not None]
    by_priority = (entry for _, entry in sorted(ranked, key=lambda pair: -pair[0]))
    return [get_entry(name) for name in with_pairs(fastest_first(by_priority, measured), measured)]


def _is_auto(name: str) -> bool:
    """Whether the registry is to choose. What is no name at all is refused by `get_entry`."""
    return str(name).upper() == AUTO


def _groups(specs: Specs) -> Groups:
    from attn_backends.spec import plan_groups  # it loads torch

    groups = plan_groups(specs if isinstance(specs, Mapping) else dict(enumerate(specs)))
    if not groups:
        raise ValueError("no layer to serve: give each layer's AttentionSpec, by its name or in order")
    return groups


def _verdict(
    entry: BackendEntry, groups: Groups, caches: Caches, device: torch.device | str, options: Mapping[str, Any] | None
) -> Verdict:
    priority = entry.priority
    try:
        backend = get_backend(entry.name)
        priority = get_entry(entry.name).priority  # the import may have stated it
        valid = validate_options(entry.name, options) if options else None
        cache, rejections = _fitting(backend, groups, caches, device, valid)
    except BackendImportError as error:
        reason = f"{error.reason}. Try: {error.fix}"
        if not (entry.module or entry.probe):
            return Verdict(entry.name, priority, import_error=reason)
        backend = get_class(entry)
        # Kernels that would not run here, or not for such layers, need not be installed: that reason helps more.
        _, known = _fitting(backend, groups, caches, device)
        cache, rejections = None, tuple(each for each in known if each.rejection.code in ("device", "mla"))
        if not rejections:
            return Verdict(entry.name, priority, import_error=reason, is_candidate=_is_candidate(backend, groups))
    return Verdict(entry.name, priority, rejections, is_candidate=_is_candidate(backend, groups), cache=cache)


def _fitting(
    backend: type[AttentionBackend], groups: Groups, caches: Caches, device: torch.device | str,
    options: Any = None,
) -> tuple[KVCacheSpec | None, tuple[LayerRejection, ...]]:  # fmt: skip
    """The first cache that a backend serves the layers with, or what it refuses of the first of all."""
    refused: list[tuple[LayerRejection, ...]] = []
    caches = caches if isinstance(caches, Sequence) else [caches]
    if not caches:
        raise ValueError("no cache to serve: give a KVCacheSpec, or several, best first")
    places = {size: place for place, size in enumerate(backend.preferred_page_sizes(device))}
    for cache in sorted(caches, key=lambda cache: places.get(cache.page_size, len(places))):
        layers: dict[Rejection, list[Hashable]] = {}
        for group in groups:
            for rejection in backend.reject_set_up(group.spec, cache, device, options):
                layers.setdefault(rejection, []).extend(group.layers)
        refused.append(tuple(LayerRejection(rejection, tuple(names)) for rejection, names in layers.items()))
        if not refused[-1]:
            return cache, ()
    return None, refused[0]


def _is_candidate(backend: type[AttentionBackend], groups: Groups) -> bool:
    from attn_backends.spec import MLASpec  # it loads torch

    return backend.capabilities().mla in {isinstance(group.spec, MLASpec) for group in groups}


def _refusal(name: str, verdicts: Iterable[Verdict]) -> Exception:
    """The error of a refusal; AUTO's has the reasons of every backend, each with its name."""
    from attn_backends.interface.capabilities import Rejection, Unsupported  # it loads torch

    if not _is_auto(name):
        return Unsupported(name.upper(), [found.rejection for verdict in verdicts for found in verdict.rejections])
    verdicts = [verdict for verdict in verdicts if verdict.is_candidate]
    found = [
        replace(layers.rejection, supported=f"{layers.rejection.supported} ({verdict.name})")
        for verdict in verdicts
        for layers in verdict.rejections
    ] + [
        Rejection("import", verdict.name, "backends that can be imported", verdict.import_error)
        for verdict in verdicts
        if verdict.import_error
    ]
    return Unsupported(AUTO, found)


def _reason(
    name: str, verdicts: list[Verdict], measured: Measured | None, device: torch.device | str, groups: Groups
) -> str:
    """Why the last verdict's backend is used, and what it says of itself here."""
    note = get_backend(verdicts[-1].name).note(device)
    return "; ".join(filter(None, [_choice(name, verdicts, measured, unmeasured(_gpu_name(device), groups)), note]))


def _choice(name: str, verdicts: list[Verdict], measured: Measured | None, why: str | None = None) -> str:
    if not _is_auto(name):
        return f"{verdicts[-1].name} was asked for by name and serves every layer"
    passed = "; ".join(f"{verdict.name} was passed over: {verdict.reasons[0]}" for verdict in verdicts[:-1])
    by = "by priority"
    if measured is not None and measured.knows(verdicts[-1].name):
        by = f"as measured ({measured})"
    elif why:
        by = f"by priority ({why})"
    return f"AUTO: the first {by} that serves every layer{'; ' if passed else ''}{passed}"
