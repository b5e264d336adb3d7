"""C sources of the package, compiled by the machine's own compiler at first use and kept in the user's cache.

`$CC`, else `cc`, else `gcc`. A file is named by all that it depends on: source, headers, flags, compiler and CPU.
Nothing is linked but torch: OpenMP is the one that torch has loaded, so that its threads are the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from attn_backends.machine import cache_folder
from attn_backends.validation import CacheFolderError

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
SHARED = Path(__file__).parent  # headers for sources in any folder
TIMEOUT_S = 120
DIGEST_BYTES = 32  # of a kept library, behind it: one cut short could end the process when it is loaded


class CompileError(RuntimeError):
    """No library could be made from a source; says why."""


def load(source: Path, defines: Mapping[str, int | str]) -> ctypes.CDLL:
    """The library of a source file, compiled with these macros if that was not done before.

    Raises:
        CompileError: no compiler, or one that fails.
    """
    wish = shlex.split(os.environ.get("CC", ""))
    found = next((name for name in (wish[:1] or ("cc", "gcc")) if shutil.which(name)), None)
    if found is None:
        wanted = f"$CC ({wish[0]})" if wish else "cc or gcc"
        raise CompileError(f"there is no C compiler, {wanted}; install one (on Debian: apt install gcc)")
    compiler = [found, *wish[1:]]
    flags = [*FLAGS, f"-I{SHARED}", *(f"-D{name}={value}" for name, value in defines.items())]
    headers = [header for folder in (source.parent, SHARED) for header in sorted(folder.glob("*.h"))]
    texts = [path.read_text(encoding="utf-8") for path in (source, *headers)]
    ingredients = [*texts, *compiler, *flags, _run([*compiler, "--version"]), _cpu(), torch.__file__]
    name = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:24]
    try:
        path = cache_folder() / "native" / f"{source.stem}-{name}.so"
    except CacheFolderError as error:
        raise CompileError(str(error)) from error
    if not _is_whole(path):
        _compile([*compiler, *flags], source, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} cannot be loaded: {error}") from error


def _compile(command: list[str], source: Path, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made, linked = Path(folder, "made.o"), Path(folder, "linked.so")
            _run([*command, "-c", str(source), "-o", str(made)])
            # Linked without -fopenmp, which would bring the system's OpenMP beside torch's.
            libraries = Path(torch.__file__).parent / "lib"
            _run([command[0], "-shared", str(made), "-o", str(linked), f"-L{libraries}", "-ltorch_cpu", "-lm"])
            content = linked.read_bytes()
            linked.write_bytes(content + hashlib.sha256(content).digest())
            linked.replace(path)
    except OSError as error:
        raise CompileError(f"cannot write to {path.parent}: {error}") from error


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        cpuinfo = []
    return platform.machine() + "".join(sorted({line for line in cpuinfo if line.startswith(("flags", "Features"))}))
