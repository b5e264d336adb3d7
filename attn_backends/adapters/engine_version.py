"""Which versions of an engine an adapter is checked with. Any other is refused by name, unless a variable allows it."""

from __future__ import annotations

import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version

ALLOW = "ATTN_BACKENDS_ALLOW_UNTESTED"

logger = logging.getLogger(__name__)


class UntestedEngine(RuntimeError):
    """An engine is of a version that its adapter was not checked with."""


def check_engine_version(package: str, oldest: str, newest: str) -> tuple[int, ...]:
    """The numbers of the installed engine's version, which lies between two that were checked, both included:
    run, or by their signatures.

    Args:
        package: the distribution, as pip names it.
        oldest, newest: versions in as many numbers as count: "0.33" takes in 0.33.1.

    Raises:
        UntestedEngine: it is older or newer, or not installed. `ATTN_BACKENDS_ALLOW_UNTESTED=1` makes a warning of it.
    """
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise UntestedEngine(f"{package} is not installed: pip install {package}, {oldest} to {newest}") from error
    numbers, first, last = (_numbers(text) for text in (found, oldest, newest))
    if first <= numbers[: len(first)] and numbers[: len(last)] <= last:
        return numbers
    message = (
        f"{package} is {found}, and attn_backends is checked with {oldest} to {newest}: install one of these, or set "
        f"{ALLOW}=1 to go on untested"
    )
    if os.environ.get(ALLOW, "") in ("", "0"):
        raise UntestedEngine(message)
    logger.warning("%s", message)
    return numbers


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 26, 0) of "0.26.0rc1+cpu"."""
    matched = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in matched[0].split(".")) if matched else ()
