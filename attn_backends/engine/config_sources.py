"""`load_config`: settings from defaults, a YAML file, environment variables and options, each value with its source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from attn_backends.engine.config import EngineConfig
from attn_backends.validation import ConfigError, KeyPath, config_error, sections
from attn_backends.yaml_values import read_yaml

PREFIX = "ATTN_BACKENDS_"  # of environment variables
OF_ADAPTERS = frozenset(  # which read these by themselves: they are no settings of the engine
    PREFIX + name for name in ("ALLOW_UNTESTED", "FLASHINFER_TENSOR_CORES", "SGLANG_OPTIONS", "VLLM")
)


class Given(NamedTuple):
    """A value and where it was written."""

    value: Any
    source: str


_NESTED = {*dict(sections(EngineConfig)), ("backend_options",)}  # merged key by key; any other value is taken whole


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] = {},
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Settings from, weakest first: defaults, a YAML file, environment variables, overrides.

    A backend may be registered after this: its name and options are looked up where an engine is made.

    Args:
        path: YAML file, or None.
        overrides: values by dotted key, such as `{"cache.page_size": 32}`; a value of None is as if absent.
        environ: replaces `os.environ`. `ATTN_BACKENDS_CACHE__PAGE_SIZE=32` sets `cache.page_size`; values are YAML.

    Raises:
        ConfigError: names every problem, where it came from and what is allowed.
    """
    given: dict[KeyPath, Given] = {}
    if path is not None:
        file = Path(path)
        try:
            content = read_yaml(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            near = get_close_matches(file.name, [p.name for p in file.parent.glob("*.y*ml")], n=3)
            hint = f"near it: {', '.join(near)}" if near else "give the path of a YAML file, such as configs/cpu.yaml"
            raise ConfigError(f"cannot read config file {file}: {getattr(error, 'strerror', error)}; {hint}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"config file {file} is not valid YAML: {error}") from error
        if not isinstance(content, Mapping | None):
            raise ConfigError(f"config file {file} holds {content!r}; allowed: settings, such as 'backend: TORCH'")
        given |= _leaves((), (content or {}), f"file {path}")
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX) and name not in OF_ADAPTERS:
            key = tuple(name.removeprefix(PREFIX).lower().split("__"))
            given |= _leaves(key, _read_value(name, text), f"environment variable {name}")
    for dotted, value in overrides.items():
        if value is not None:
            given |= _leaves(tuple(dotted.split(".")), value, f"option {dotted}")
    try:
        return TypeAdapter(EngineConfig).validate_python(_nest(given))
    except ValidationError as error:
        raise config_error(error, EngineConfig, lambda path: _source(path, given)) from error


def _read_value(name: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"environment variable {name}={text!r} is not a YAML value; quote it: {error}") from error


def _leaves(key: KeyPath, value: Any, source: str) -> dict[KeyPath, Given]:
    """A value by key path; sections are opened, and one left empty says nothing."""
    if key in _NESTED and value is None:
        return {}
    if key in _NESTED and isinstance(value, Mapping):
        return {k: v for name, sub in value.items() for k, v in _leaves((*key, str(name)), sub, source).items()}
    return {key: Given(value, source)}


def _nest(given: Mapping[KeyPath, Given]) -> dict[str, Any]:
    """Key paths back to nested dicts. A scalar where a section belongs stays, for validation to refuse."""
    tree: dict[str, Any] = {}
    for key, (value, _) in sorted(given.items(), key=lambda item: len(item[0])):
        node: Any = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        else:
            node[key[-1]] = value
    return tree


def _source(path: KeyPath, given: Mapping[KeyPath, Given]) -> str:
    """The place where a value was written, or the section around it, or a part of it."""
    return given[min((key for key in given if key[: len(path)] == path[: len(key)]), key=len)].source
