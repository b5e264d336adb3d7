"""`validate_options`: what a config's `backend_options` say, checked by the backend's own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_backends.registry.phases import PHASES, phases_of
from attn_backends.registry.table import get_backend, get_entry, import_target
from attn_backends.validation import ConfigError, config_error

if TYPE_CHECKING:
    from pydantic import BaseModel

    from attn_backends.interface.phases import Phases


def validate_options(name: str, options: Mapping[str, Any]) -> BaseModel | Phases[Any] | None:
    """A backend's `backend_options`, validated by its own model; None for a backend that has none and is given none.

    Those of two backends stand under `prefill` and `decode`.

    Raises:
        ConfigError: an option is unknown or out of range, or the backend takes none.
    """
    phases = phases_of(name)
    if phases is None or phases[0] == phases[1]:
        return _validated(name, options, ("backend_options",))
    if not options:
        return None
    from attn_backends.interface.phases import Phases  # it loads torch

    if wrong := [key for key, given in options.items() if key not in PHASES or not isinstance(given, Mapping)]:
        raise ConfigError(
            f"backend_options: two backends have theirs under prefill and decode; given: {', '.join(wrong)}. Write "
            "backend_options: {prefill: {...}, decode: {...}}, and leave out a phase that has none"
        )
    pairs = zip(PHASES, phases, strict=True)
    return Phases(*(_validated(name, options.get(phase, {}), ("backend_options", phase)) for phase, name in pairs))


def _validated(name: str, options: Mapping[str, Any], path: tuple[str, ...]) -> BaseModel | None:
    from pydantic import ValidationError

    get_backend(name)  # an installed plugin states its options in its module
    entry = get_entry(name)
    model: type[BaseModel] | None = import_target(entry.options) if isinstance(entry.options, str) else entry.options
    if model is None:
        if options:
            raise ConfigError(
                f"{'.'.join(path)}: {entry.name} takes none; given: {', '.join(options)}. Remove them, or choose the "
                "backend that they are for"
            )
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise config_error(error, model, lambda key: f"options of {entry.name}", path) from error
