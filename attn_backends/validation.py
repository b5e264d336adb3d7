"""What is wrong with a setting, in words: the dotted path, what was given and where, what is allowed, nearest key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

KeyPath = tuple[str, ...]  # ("cache", "page_size")


class ConfigError(ValueError):
    """A setting is unknown, out of range or unreadable; the message names each one, its source and what is allowed."""


def sections(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """A model and the models nested in it, each with its key path."""
    yield path, model
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, (*path, name))


def config_error(
    error: ValidationError, model: type[BaseModel], source: Callable[[KeyPath], str], prefix: KeyPath = ()
) -> ConfigError:
    """Every problem of a failed validation of `model`, one a line; raise it `from` the pydantic error.

    Args:
        source: where the value at a key path was written, such as "file configs/cpu.yaml".
        prefix: the keys that stand before the model's own.
    """
    problems = [_problem(details, model, source, prefix) for details in error.errors()]
    return ConfigError("\n  ".join(["the configuration is not valid:", *problems]))


def _problem(details: ErrorDetails, model: type[BaseModel], source: Callable[[KeyPath], str], prefix: KeyPath) -> str:
    path = tuple(map(str, details["loc"]))
    where = f"{'.'.join((*prefix, *path))} (from {source(path)})"
    if details["type"] == "extra_forbidden":
        return f"{where}: unknown key; {_suggestion(path, dict(sections(model)), prefix)}"
    if details["type"] == "missing":
        return f"{where}: missing; it has no default"
    allowed = details["msg"].removeprefix("Value error, ").replace("Input should be", "allowed:")
    return f"{where}: got {details['input']!r}; {allowed}"


def _suggestion(path: KeyPath, known: dict[KeyPath, type[BaseModel]], prefix: KeyPath) -> str:
    """The nearest key of the same section; else the same key elsewhere; else the nearest ones elsewhere."""
    *section, last = path
    allowed = sorted(known[tuple(section)].model_fields)
    near = [(*section, key) for key in get_close_matches(last, allowed, n=1)]
    for cutoff in (1.0, 0.6):
        near = near or [
            (*at, key) for at, model in known.items() for key in get_close_matches(last, model.model_fields, 3, cutoff)
        ]
    listed = f"allowed here: {', '.join(allowed)}"
    return f"did you mean {' or '.join('.'.join((*prefix, *key)) for key in near)}? ({listed})" if near else listed


class CacheFolderError(OSError):
    """The cache folder cannot be found or written; says which, why, and what to set."""
