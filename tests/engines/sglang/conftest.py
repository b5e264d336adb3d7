"""Tests over SGLang itself, in an environment that has it: `make test-engines`. Elsewhere none of them is collected."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    import stubs
    import torch

    stubs.install()
    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = lambda seed: None
    import sglang.srt.layers.attention.attention_registry  # noqa: F401  before others put stand-ins in its place
