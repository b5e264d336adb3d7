"""Tests over SGLang itself, in an environment that has it: `make test-engines`. Elsewhere none of them is collected."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def is_here() -> bool:
    """Whether SGLang itself can be imported; what other tests put in its place has no spec."""
    try:
        return importlib.util.find_spec("sglang") is not None
    except ValueError:
        return False


if not is_here():
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    import stubs
    import torch

    stubs.install()
    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = lambda seed: None
        torch.cuda.get_rng_state = torch.cuda.set_rng_state = lambda *args, **kwargs: None
    import sglang.srt.layers.attention.attention_registry  # noqa: F401  before others put stand-ins in its place
