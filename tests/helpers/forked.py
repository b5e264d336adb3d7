"""`python …` as a process forked from one that has imported torch and transformers: most of what a command takes.

A fork is otherwise what a new process is: it has its own arguments, environment, folder, module path and standard
streams, imports this package anew, and ends as an interpreter ends. It is forked from a process that was started with
its own variables for Python, the locale and Triton; in UTF-8 if they do not say, so that one such process serves most.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
READ_AT_START = ("PYTHON", "LC_", "LANG", "OMP_", "MKL_", "LD_", "TRITON_")
# Nothing of this package: a command that lacks an import of ours is to fail.
IMPORTED = (
    "torch", "numpy", "pydantic", "typer", "rich.table", "yaml", "torch._dynamo",
    "transformers.integrations.accelerate",
    "transformers.integrations.flash_attention", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


class Forked:
    """A command that runs, on open files as its standard streams."""

    def __init__(
        self, arguments: Sequence[str], streams: Sequence[int], environ: Mapping[str, str], folder: Path = ROOT
    ) -> None:
        own = {"PYTHONUTF8": "1"} | {name: value for name, value in environ.items() if name.startswith(READ_AT_START)}
        own.pop("PYTHONPATH", None)
        self._server = _server(tuple(sorted(own.items())))
        connection, _ = self._server
        request = json.dumps([arguments, dict(environ), str(folder)]).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], streams)
        connection.sendall(request)

    def wait(self) -> int:
        """Its exit code; the negative number of a signal that ended it."""
        connection, process = self._server
        try:
            return int.from_bytes(_receive(connection, 4), "big", signed=True)
        except OSError as error:  # or too late
            _server.cache_clear()
            process.kill()
            told = process.communicate()[1].decode()
            raise RuntimeError(f"the process that forks has not answered: {error}; it said: {told}") from error


def run_python(
    *arguments: str, given: bytes = b"", folder: Path = ROOT, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *arguments])` answers, with its text."""
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        code = Forked(arguments, [stdin.fileno(), stdout.fileno(), stderr.fileno()], environ, folder).wait()
        return subprocess.CompletedProcess(arguments, code, _text(stdout), _text(stderr))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@functools.cache
def _server(variables: tuple[tuple[str, str], ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, started with these variables, and the way to it; it ends with this one."""
    ours, theirs = socket.socketpair()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(READ_AT_START)}
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.helpers import forked; forked.serve()()"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environ | dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip (as pipes: what serves for a file, in Python's streams, does not for a pipe)
    ours.settimeout(TIMEOUT_S)
    return ours, process


def serve() -> Callable[[], object]:
    """Forks for every command; returns, in a fork alone, what runs it."""
    del sys.path[:2]  # what the command line put there
    client = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the tests
    gc.freeze()
    while True:
        size, streams, _, _ = socket.recv_fds(client, 4, 3)
        if not size:
            os._exit(0)
        request = json.loads(_receive(client, int.from_bytes(size, "big")))
        process = os.fork()
        if process == 0:
            client.close()
            return functools.partial(_run, *request, streams)
        for stream in streams:
            os.close(stream)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        client.sendall(code.to_bytes(4, "big", signed=True))


def _receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionError("the process at the other end has ended")
        content += part
    return content


def _run(arguments: list[str], environ: dict[str, str], folder: str, streams: list[int]) -> None:
    """Runs what `python` with these arguments runs."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:0] = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    main: dict[str, Any] = vars(sys.modules["__main__"])
    del main["forked"], main["sys"]
    how, *rest = arguments
    if how == "-c":
        sys.path[:0], sys.argv = [""], ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main)
    elif how == "-m":
        sys.path[:0], sys.argv = [folder], ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    else:
        sys.path[:0], sys.argv = [os.path.dirname(os.path.abspath(how))], arguments
        runpy.run_path(how, run_name="__main__")
