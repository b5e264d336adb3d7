"""Processes of vLLM's CPU build: where it is installed, with which variables, and what came of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENT = Path(
    sys.prefix
)  # `.ci/engines vllm` makes it: the newest version, and an older one in a folder beside it
COMMAND = "command"  # in the models' folder: what names the CPU build to the command `vllm`
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # processes beside each other would all take the same cores
}  # fmt: skip


class Serve:
    """What a process serves, when it has ended: `serve(VERSION, SCENARIO, ..., VARIABLE=VALUE)`.

    Args:
        begin: starts it, once, beside another one; for what is wanted next.
    """

    def __init__(self, begin: Callable[..., Future[dict[str, Any]]]) -> None:
        self.begin = begin

    def __call__(self, version: str, *names: str, **variables: str) -> dict[str, Any]:
        return self.begin(version, *names, **variables).result()


def environment(folder: Path, version: str, **more: str) -> dict[str, str]:
    """A process's variables: the newest version is the environment's own, another lies beside it."""
    beside = ENVIRONMENT / version
    path = [folder, ROOT, ROOT / "examples" / "plugin", *([beside] if beside.exists() else [])]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "ATTN_BACKENDS"))}
    return inherited | QUIET | {"PYTHONPATH": os.pathsep.join(map(str, path))} | more


def started(command: Sequence[str], variables: dict[str, str], out: Path) -> dict[str, Any]:
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200, check=False
    )
    if done.returncode or not out.exists():
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return json.loads(out.read_text()) | {"log": done.stdout}  # type: ignore[no-any-return]
