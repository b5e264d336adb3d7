"""Where the package keeps files for the next start."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/attn_backends`, or `~/.cache/attn_backends`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backends"
