"""How the `attn-backends` command ends when it does not end well: one message, an exit code, no traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from attn_backends.validation import CacheFolderError

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130
_UsageError: Any = typer.BadParameter.__mro__[1]  # of the click that typer has, its own or the package


class Screen(Console):
    """A console that leaves a closed pipe to `Commands`, where rich's own would end the command with exit code 1, and
    colons as they are: rich makes an emoji of `:X:`."""

    def __init__(self, **how: Any) -> None:
        super().__init__(emoji=False, **how)

    def on_broken_pipe(self) -> None:
        raise


@contextmanager
def clear_errors() -> Iterator[None]:
    """Wrong input ends in its message on stderr and exit code 2, a failure in its message and 1; no traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        if _interrupted.is_set():
            raise KeyboardInterrupt from error
        if not _is_of_output(error):
            _tell(error)
        raise


def _is_of_output(error: Exception) -> bool:
    """Whether what is printed found no room: an error of a file has its name."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None


def _tell(error: Exception) -> None:
    """End the command with an error's words, if it is one that has words for users."""
    if isinstance(error, (CacheFolderError, FloatingPointError, MemoryError)):
        _end(str(error) or "there is not enough memory", EXIT_FAILED, error)
    if isinstance(error, (ValueError, TypeError, ImportError, OSError, NotImplementedError)):
        missing = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("attn_backends")
        hint = "; try: pip install 'attn-backends[hf]'" if missing else ""
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
            hint = ". Set HOME, XDG_CACHE_HOME and TRITON_CACHE_DIR to folders that can be written"
        _end(str(error) + hint, EXIT_WRONG_INPUT, error)


class Commands(TyperGroup):
    """The commands, each of which ends in our words: also for options that it has not, a closed pipe, and Ctrl-C."""

    def main(self, args: Sequence[str] | None = None, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]
        # What a terminal or a pipe cannot encode, as in an ASCII locale, is written as escapes.
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, standalone_mode=False, **more)
        except _UsageError as error:
            code = tell_usage(error)
        except OSError as error:
            if not _is_of_output(error):
                raise
            _drop_output()
            _print(f"what this prints cannot be written: {error.strerror}")
            code = EXIT_FAILED
        if not standalone_mode:
            return code
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _interrupts_stay():
                result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()  # whoever read it has gone
            raise typer.Exit(0) from None
        except KeyboardInterrupt as error:
            _end("interrupted", EXIT_INTERRUPTED, error)
        return result


def _drop_output() -> None:
    """What is left of output that cannot be written goes nowhere, also at the interpreter's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, AttributeError):
            os.dup2(nowhere, stream.fileno())


_interrupted = threading.Event()


@contextmanager
def _interrupts_stay() -> Iterator[None]:
    """Ctrl-C is a `KeyboardInterrupt`, as always, and noted: while it is imported, a library may make another error
    of it, or none."""

    def interrupt(number: int, frame: Any) -> None:
        _interrupted.set()
        signal.default_int_handler(number, frame)

    _interrupted.clear()
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def tell_usage(error: Any) -> int:
    """Say what is wrong with the words of a command line; returns the exit code."""
    command = error.ctx.command_path if error.ctx else "attn-backends"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.ctx.get_help())
        return EXIT_WRONG_INPUT
    message = error.format_message()
    if hasattr(error, "possibilities") and isinstance(name := getattr(error, "option_name", None), str):
        message = f"{command} has no option {name}{_as_setting(name) or _nearest(error)}"
    _print(f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} {command} --help lists what there is")
    return EXIT_WRONG_INPUT


def _nearest(error: Any) -> str:
    possible = getattr(error, "possibilities", None)
    return f"; did you mean {' or '.join(sorted(possible))}?" if possible else ""


def _as_setting(option: str) -> str:
    """What to type where an option's name is that of a setting, which has no option."""
    from attn_backends.engine.config import EngineConfig
    from attn_backends.engine.config_sources import PREFIX
    from attn_backends.validation import sections

    name = option.lstrip("-").replace("-", "_").partition("=")[0]
    paths = [(*path, name) for path, model in sections(EngineConfig) if name in model.model_fields]
    if not paths:
        return ""
    dotted, variable = ".".join(paths[0]), PREFIX + "__".join(paths[0]).upper()
    return f"; {dotted} is a setting: write it in a YAML file for --config, or set {variable} in the environment"


def _end(message: str, code: int, error: BaseException) -> NoReturn:
    _print(message)
    raise typer.Exit(code) from error


def _print(message: str) -> None:
    Screen(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(message)}", highlight=False)
