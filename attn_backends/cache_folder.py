"""Where the package keeps files for the next start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TO_TYPE = "set XDG_CACHE_HOME to a folder that can be written"


class CacheFolderError(OSError):
    """The cache folder cannot be found or written; says which, why, and what to set."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/attn_backends`, or `~/.cache/attn_backends`.

    Raises:
        CacheFolderError: neither variable is set, and there is no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backends"
    except RuntimeError as error:
        raise CacheFolderError(f"there is no cache folder ({error}): {_TO_TYPE}") from error


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder inside `parent`, made if need be, that is removed at the end.

    Raises:
        CacheFolderError: nothing can be written there, or no longer.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        if isinstance(error, CacheFolderError):
            raise
        why = error.strerror or error
        raise CacheFolderError(f"the cache folder {parent} cannot be written ({why}): {_TO_TYPE}") from error
