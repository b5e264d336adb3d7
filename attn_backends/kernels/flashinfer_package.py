"""The package `flashinfer`, as the backends over it find it: its version, and kernels that it cannot compile."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Version = tuple[int, ...]

# Its running maxima begin at -5e4 (`math::inf`): of q·k in fa2 and fa3, of logits in base 2 in decode on CUDA cores and
# where parts of a row are joined. A query all of whose keys lie below comes back with zeros (FlashInfer's issues 4267,
# 4450 and 4451, mended after 0.6.18).
LOWEST_LOGIT = -5e4 * math.log(2)


def load_flashinfer(module: Any, first: Version, below: Version) -> tuple[Any, Version]:
    """The package and its version.

    Args:
        module: what stands for the package; None to import it.
        first, below: the versions that the caller knows.

    Raises:
        ImportError: another version.
    """
    module = importlib.import_module("flashinfer") if module is None else module
    found = tuple(map(int, re.findall(r"\d+", module.__version__)[:3]))
    if not first <= found < below:
        known = " to below ".join(".".join(map(str, version)) for version in (first, below))
        raise ImportError(f"flashinfer-python {module.__version__} is installed; this backend knows {known}")
    return module, found


@contextmanager
def missing_kernels(what: str) -> Iterator[None]:
    """Say what to do where FlashInfer has no kernels for `what` and cannot compile them.

    Raises:
        RuntimeError: instead of what FlashInfer raises for a missing compiler, chained to it.
    """
    try:
        yield
    except (FileNotFoundError, OSError, RuntimeError) as error:
        message = str(error)
        if not any(word in message.lower() for word in ("nvcc", "ninja", "cuda_home", "build failed", "compil")):
            raise
        raise RuntimeError(
            f"FlashInfer has no kernels ready for {what}, and cannot compile them here. Install the CUDA "
            "toolkit (nvcc) and ninja, or the ready kernels: pip install flashinfer-cubin flashinfer-jit-cache"
        ) from error
