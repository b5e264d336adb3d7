"""The command where something is wrong: one message of ours and an exit code, by the real command on a real model."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest
import torch
from typer.testing import CliRunner

from attn_backends import LLM, SamplingParams
from attn_backends.cli import app as cli
from attn_backends.cli.errors import clear_errors
from attn_backends.engine.sampler import Sampler
from tests.helpers.forked import Forked, run_python
from tests.helpers.tiny_models import save_tiny

ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}
UTF8 = {"PYTHONUTF8": "1"}
QUICK = {"ATTN_BACKENDS_ACCELERATE": "off", "ATTN_BACKENDS_CACHE__NUM_PAGES": "64"}  # nothing is measured or filled
FORBIDDEN = ("Traceback", "pydantic.dev", "Exception ignored", "UnicodeEncodeError", "Errno")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("command") / "llama")


def run(*arguments: str, given: bytes = b"", **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the real command."""
    variables = os.environ | UTF8 | QUICK | environ
    done = run_python("-m", "attn_backends.cli.app", *arguments, given=given, environ=variables)
    assert not [word for word in FORBIDDEN if word in done.stderr], done.stderr
    return done.returncode, done.stdout, done.stderr


def run_onto(stdout: IO[bytes], words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and standard error of the real command, whose standard output goes to a file."""
    with open(os.devnull, "rb") as stdin, TemporaryFile() as stderr:
        streams = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
        code = Forked(("-m", "attn_backends.cli.app", *words), streams, environ).wait()
        stderr.seek(0)
        return code, stderr.read().decode()


def answer(model: Path, *more: str) -> tuple[str, ...]:
    return ("generate", "--model", str(model), "--device", "cpu", "--max-tokens", "3", *more)


@pytest.mark.first
def test_an_ascii_locale(model: Path) -> None:
    prompt = "höre € 😀"
    code, out, err = run(*answer(model, "--prompt", prompt, "--prompt", "zwei"), **ASCII)
    assert code == 0
    assert out.isascii()
    assert r"h\xf6re \u20ac \U0001f600" in out
    assert "standard output is ascii" in err
    code, out, _ = run(*answer(model, "--json"), given=prompt.encode(), **ASCII)
    assert (code, json.loads(out)["stats"]["num_prompt_tokens"]) == (0, len(prompt.encode()))
    for words in (("generate", "--help"), ("list",)):
        assert run(*words, **ASCII)[0] == 0


@pytest.mark.parametrize(
    "more", [(), *(pytest.param((option,), marks=pytest.mark.long) for option in ("--no-stream", "--json"))]
)
def test_a_closed_pipe_ends_it_quietly(model: Path, more: tuple[str, ...]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as stdout:
        code, err = run_onto(stdout, answer(model, "--prompt", "a", "--prompt", "b", *more), os.environ | UTF8)
    assert code == 0
    assert not [word for word in (*FORBIDDEN, "error") if word in err], err


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had it ignored
from attn_backends.cli.app import app
import attn_backends.engine.llm as llm
def load(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
def load_in_library(*arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        raise ModuleNotFoundError("cannot import a part: check that it is installed") from None
llm.load_model = {load}
app({words!r})
"""


@pytest.mark.parametrize("load", [pytest.param("load", marks=pytest.mark.long), "load_in_library"])
def test_an_interrupt_while_loading(model: Path, load: str) -> None:
    """Also where a library makes another error of it."""
    code = INTERRUPTED.format(load=load, words=list(answer(model, "--prompt", "a")))
    done = run_python("-c", code, environ=os.environ | UTF8)
    assert done.returncode in (130, -signal.SIGINT)  # a shell shows 130 of both
    assert done.stderr.strip() == "error: interrupted"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("list",), ("--help",), ("generate",)], ids=str)
def test_output_that_finds_no_room(words: tuple[str, ...], model: Path) -> None:
    words = answer(model, "--prompt", "a") if words == ("generate",) else words
    with open("/dev/full", "wb") as full:
        code, err = run_onto(full, words, os.environ | UTF8 | QUICK)
    assert code == 1
    assert err.strip() == "error: what this prints cannot be written: No space left on device"


def test_a_cache_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "file" / "cache")}
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    code, _, err = run("generate", "--model", str(gguf), "--prompt", "a", **nowhere)
    assert code == 1
    assert f"the cache folder {tmp_path}/file/cache/attn_backends cannot be written (Not a directory)" in err
    assert "set XDG_CACHE_HOME to a folder that can be written" in err
    words = ("-m", "attn_backends.cli.app", *answer(model, "--prompt", "a"))
    done = run_python(*words, environ=os.environ | UTF8 | QUICK | nowhere)
    assert done.returncode == 0, "a model that needs no conversion needs no cache folder"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("generate", "--trust-remote-code"), "has no option --trust-remote-code; trust_remote_code is a setting: "
         "write it in a YAML file for --config, or set ATTN_BACKENDS_TRUST_REMOTE_CODE in the environment"),
        (("generate", "--page-size", "3"), "set ATTN_BACKENDS_CACHE__PAGE_SIZE in the environment"),
        (("generate", "--max-token", "3"), "has no option --max-token; did you mean"),
        (("generate", "--nonsense"), "generate --help lists what there is"),
        (("explain", "--prompt", "a"), "has no option --prompt"),
        (("generate", "--prompt"), "Option '--prompt' requires an argument"),
        (("generate", "--max-tokens"), "Option '--max-tokens' requires an argument"),
        (("list", "--json=yes"), "Option '--json' does not take a value"),
        (("genrate",), "No such command 'genrate'. Did you mean 'generate'?"),
        (("doctor",), "Missing argument"),
        (("generate", "--max-tokens", "x"), "Invalid value for '--max-tokens'"),
        (("generate", "--seed", "1.5"), "Invalid value for '--seed'"),
        (("generate", "--max-tokens", "-1"), "sampling.max_tokens (from option sampling.max_tokens): got -1; allowed"),
        (("generate", "--accelerate", "compile", "--device", "cpu", "--prompt", "a"),
         "accelerate is compile and the device cpu; allowed there: off or on"),
        (("generate", "--model", "/nowhere"), "no model '/nowhere': give"),
        (("generate", "--model", "a" * 5000), "aaa…' (File name too long): give 'smollm2-135m-instruct'"),
        (("generate", "--model", "~no one/model"), "'~no one/model' (Could not determine home directory.): give"),
        (("bench", "--dry-run", "--model", "a" * 300 + "/config.json"), "aaa…' (File name too long): give"),
        (("generate", "--prompts-file", "/nowhere"), "--prompts-file /nowhere"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_words_that_it_does_not_know(words: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(cli.app, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.strip().startswith("error: ")


def test_code_that_a_model_brings_is_not_run(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    code, out, err = run(*answer(folder, "--prompt", "a"))
    assert (code, out) == (2, "")
    assert "write trust_remote_code: true in the config file, or set ATTN_BACKENDS_TRUST_REMOTE_CODE=true" in err
    assert "trust_remote_code=True" not in err


def test_input_that_is_no_utf8(model: Path, tmp_path: Path) -> None:
    code, _, err = run(*answer(model), given=b"\xff\xfeH")
    assert (code, "standard input is not UTF-8" in err) == (2, True)
    (tmp_path / "prompts").write_bytes(b"\xff\xfe")
    code, _, err = run(*answer(model, "--prompts-file", str(tmp_path / "prompts")))
    assert (code, "--prompts-file" in err) == (2, True)
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfab\n")  # a byte order mark is no part of the prompt
    code, out, _ = run(*answer(model, "--json", "--prompts-file", str(tmp_path / "prompts")))
    assert (code, json.loads(out)["stats"]["num_prompt_tokens"]) == (0, 2)


def test_an_argument_that_is_no_text_fails_alone(model: Path) -> None:
    code, out, _ = run(*answer(model, "--json", "--prompt", "fine", "--prompt", "a\udcffb"))  # from the byte 0xff
    fine, broken = json.loads(out)["results"]
    assert (code, fine["error"], broken["finish_reason"]) == (1, None, "error")
    assert "lone surrogate, U+DCFF, at character 1" in broken["error"]


@pytest.mark.parametrize("how", ["--stream", "--no-stream", "--json"])
def test_a_text_whose_logits_are_not_finite_is_shown_as_far_as_it_came(
    model: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Sampler.choose

    def lost(sampler: Sampler, logits: torch.Tensor, requests: Any, num_ahead: int = 0) -> Any:
        is_lost = [request.request_id == "1" and request.num_output_tokens + num_ahead > 1 for request in requests]
        return choose(sampler, logits.masked_fill(torch.tensor(is_lost)[:, None], torch.nan), requests, num_ahead)

    monkeypatch.setattr(Sampler, "choose", lost)
    words = answer(model, "--prompt", "fine", "--prompt", "lost", how)
    done = CliRunner().invoke(cli.app, words, env=QUICK)
    texts = LLM.from_pretrained(model).generate(["fine", "lost"], SamplingParams(max_tokens=3))
    assert done.exit_code == 1
    assert "logits are not finite; check the model's weights" in " ".join(done.output.split())
    if how == "--json":
        assert [result["text"] for result in json.loads(done.stdout)["results"]] == [text.text for text in texts]
    assert [text.finish_reason for text in texts] == ["length", "error"]
    assert len(texts[1].token_ids) == 2
    assert how == "--json" or texts[1].text in done.output


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("a"), 2), (TypeError("a"), 2), (ImportError("a"), 2), (PermissionError(13, "denied", "/x"), 2),
     (FloatingPointError("a"), 1), (MemoryError(), 1)],
)  # fmt: skip
def test_errors_end_in_their_words(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception) as caught, clear_errors():  # noqa: PT011 (what it is, is the next line)
        raise error
    assert getattr(caught.value, "exit_code", None) == code
    assert capsys.readouterr().err.startswith("error: ")


OPTIONS = ["--config", "--backend", "--device", "--model", "--dtype", "--prompt", "--prompts-file", "--max-tokens",
           "--temperature", "--top-k", "--top-p", "--seed", "--stop", "--chat", "--raw", "--json"]  # fmt: skip
COMMANDS = ["generate", "explain", "list", "", "help", "--version"]


@pytest.mark.parametrize("seed", range(40))
def test_any_words_end_without_a_traceback(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random commands, options and values; no model is loaded, as none of these is one."""
    monkeypatch.setenv("ATTN_BACKENDS_MODEL", "/nowhere")
    rng = random.Random(seed)
    words = [rng.choice(COMMANDS)]
    for _ in range(rng.randint(0, 4)):
        option = rng.choice([*OPTIONS, "--" + "".join(rng.choices(string.ascii_lowercase + "-.=", k=5))])
        value = rng.choice(["", "0", "-1", "1e99", "nan", "auto", "TORCH", "cpu", "\udcff", "é", "/", "[1", None])
        words += [option] if value is None else [option, value]
    done = CliRunner().invoke(cli.app, words, input="a prompt")
    assert done.exception is None or isinstance(done.exception, SystemExit), words
    assert done.exit_code in (0, 1, 2), words
    assert done.exit_code == 0 or done.output, words
    assert not [word for word in FORBIDDEN[:2] if word in done.output], (words, done.output)
