"""YAML as settings are written in it: one value for each key."""

from __future__ import annotations

import re
from typing import Any

import yaml

# PyYAML, of YAML 1.1, takes 1e-3 for text and 1.0e-3 for a number; YAML 1.2 takes both for numbers.
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class _OneValueLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            if name.value in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading settings", node.start_mark,
                    f"{name.value} is given twice, first in line {seen[name.value].line + 1}: keep one of them",
                    name.start_mark,
                )  # fmt: skip
            seen[name.value] = name.start_mark
        return super().construct_mapping(node, deep)


_OneValueLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+.0123456789"])


def read_yaml(text: str) -> Any:
    """The value of a text.

    Raises:
        yaml.YAMLError: it is no YAML, or has a key twice, of which YAML itself keeps the last.
    """
    return yaml.load(text, _OneValueLoader)
