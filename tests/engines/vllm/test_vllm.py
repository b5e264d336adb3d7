"""vLLM's CPU build serves through us what it serves by itself: tokens, and their log-probabilities.

`.ci/engines vllm` runs all of it, and `.ci/engines vllm_short` what is not marked long, as CI does.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.vllm.processes import COMMAND, ENVIRONMENT, Serve, environment
from tests.engines.vllm.scenarios import SERVED, SMOLLM2

NEWEST, OLDER = "0.32", "0.29"
# vLLM makes no other engine in a process after n-grams.
PLAIN = ("eager", "gemma", "one group", "gpt-oss", "shared", "ngram")
LATENT = ("deepseek", "deepseek in chunks")
DRAFTING = ("mtp", "mtp in chunks")
ASYNCHRONOUS = ("asynchronous drafts", "asynchronous")
WITH_MORE_WEIGHTS = ("draft", "lora")
NOT_IN = {("0.29", "gpt-oss")}  # its own attention takes sinks in bfloat16 alone there
long = pytest.mark.long
VERSIONS = [NEWEST, pytest.param(OLDER, marks=long)]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two runs' log-probabilities."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def by_itself(serve: Serve, version: str) -> dict[str, Any]:
    """What vLLM serves, our plugin installed and nothing asked of it."""
    return serve(version, *LATENT, *plain(version))


def plain(version: str) -> list[str]:
    return [name for name in PLAIN if (version, name) not in NOT_IN]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", PLAIN)
def test_tokens_are_vllms_own(serve: Serve, version: str, name: str) -> None:
    if (version, name) in NOT_IN:
        pytest.skip(f"vLLM {version} does not serve {name} in float32 by itself")
    serve.begin(version, *plain(version), ATTN_BACKENDS_VLLM="TORCH")
    theirs = by_itself(serve, version)
    runs = serve(version, *plain(version), ATTN_BACKENDS_VLLM="TORCH"), theirs
    ours, theirs = (run["served"][name] for run in runs)
    assert ours["impls"] == ["CPU_ATTN__TORCH_Impl"]
    assert theirs["impls"] == ["CPUAttentionBackendImpl"]
    assert ours["tokens"] == theirs["tokens"]
    if SERVED[name].get("random"):
        assert apart(ours, theirs) < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_vllms_own(serve: Serve, version: str, name: str) -> None:
    """Without AMX it serves no prompts in chunks, and none behind prefixes from the cache, unless it is made to."""
    ours = serve(version, *LATENT, ATTN_BACKENDS_VLLM="TORCH_MLA")["served"][name]
    theirs = by_itself(serve, version)["served"][name]
    assert (ours["impls"], theirs["impls"]) == (["CPU_MLA__TORCH_MLA_Impl"], ["CPUMLAImpl"])
    assert ours["tokens"] == theirs["tokens"]
    assert apart(ours, theirs) < 1e-5


@long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's AMX_MLA wants a CPU with AMX")
def test_latent_attention_where_a_cpu_has_amx(serve: Serve) -> None:
    """vLLM chooses a backend of its own there, in bfloat16: tokens agree until rounding has a row take another."""
    ours, theirs = (
        serve(NEWEST, "amx", **asked)["served"]["amx"] for asked in ({"ATTN_BACKENDS_VLLM": "TORCH_MLA"}, {})
    )
    assert (ours["impls"], theirs["impls"]) == (["AMX_MLA__TORCH_MLA_Impl"], ["AMXMLAImpl"])
    alike = [_alike(*pair) for pair in zip(ours["tokens"], theirs["tokens"], strict=True)]
    assert min(alike) >= 3
    for number, a, b in zip(alike, ours["logprobs"], theirs["logprobs"], strict=True):
        assert a[:number] == pytest.approx(b[:number], abs=0.1)


def _alike(one: list[int], other: list[int]) -> int:
    """How many tokens two rows begin with alike."""
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def test_installed_alone_it_changes_nothing(serve: Serve) -> None:
    theirs, ours = by_itself(serve, NEWEST), serve(NEWEST, *PLAIN, ATTN_BACKENDS_VLLM="TORCH")
    assert theirs["registry"]["replaced"] == []
    assert ours["registry"]["replaced"] == ["CPU_ATTN", "CUSTOM"]
    added = [name for name in theirs["registry"]["names"] if name.startswith("AB_")]
    assert {"AB_TORCH", "AB_TRITON", "AB_FLASHINFER", "AB_NAIVE"} <= set(added)
    assert "attn_backends:" not in theirs["log"]


def test_a_log_line_says_who_serves(serve: Serve) -> None:
    log = serve(NEWEST, *PLAIN, ATTN_BACKENDS_VLLM="TORCH")["log"]
    assert "attn_backends: TORCH serves 30 layers" in log
    assert "attn_backends: TORCH serves 4 layers in 2 plan groups" in log  # windows and none in one group of vLLM's


@pytest.mark.parametrize(
    ("version", "name"),
    [
        pytest.param(version, name, marks=long)
        for version in (NEWEST, OLDER)
        for name in ("compiled", "heads first", "spawned", "three ranks")
    ],
)
def test_every_way_to_run_it(serve: Serve, version: str, name: str) -> None:
    ours = serve(version, name, ATTN_BACKENDS_VLLM="TORCH", **SERVED[name].get("env", {}))
    assert ours["served"][name]["tokens"] == by_itself(serve, version)["served"]["eager"]["tokens"]
    told = re.findall(r"attn_backends: TORCH serves \d+ layers .*, (NHD|HND)", ours["log"])
    assert set(told) == {"HND" if name == "heads first" else "NHD"}


@long
def test_a_draft_models_steps(serve: Serve) -> None:
    """Every layer of it has its steps, also those that vLLM names late."""
    ours = serve(NEWEST, *WITH_MORE_WEIGHTS, ATTN_BACKENDS_VLLM="TORCH")["served"]["draft"]
    assert ours["impls"] == ["CPU_ATTN__TORCH_Impl"]
    assert ours["tokens"] == by_itself(serve, NEWEST)["served"]["eager"]["tokens"]


@long
def test_lora_is_vllms_own(serve: Serve) -> None:
    ours = serve(NEWEST, *WITH_MORE_WEIGHTS, ATTN_BACKENDS_VLLM="TORCH")["served"]["lora"]
    theirs = serve(NEWEST, "lora")["served"]["lora"]
    assert (ours["impls"], theirs["impls"]) == (["CPU_ATTN__TORCH_Impl"], ["CPUAttentionBackendImpl"])
    assert ours["tokens"] == theirs["tokens"]
    assert ours["tokens"] != by_itself(serve, NEWEST)["served"]["eager"]["tokens"]


@long
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_steps_are_scheduled_before_drafts_are_known(serve: Serve, name: str) -> None:
    """vLLM's platform of CPUs turns this off, and its scheduler and runner serve it: with n-grams and a draft model."""
    ours = serve(NEWEST, *ASYNCHRONOUS, ATTN_BACKENDS_VLLM="TORCH")["served"][name]
    theirs = by_itself(serve, NEWEST)["served"]["eager"]
    assert (ours["impls"], ours["scheduler"]) == (["CPU_ATTN__TORCH_Impl"], "AsyncScheduler")
    assert theirs["scheduler"] == "Scheduler"
    assert ours["tokens"] == theirs["tokens"]


@long
@pytest.mark.parametrize("name", DRAFTING)
def test_latent_attention_drafts_and_verifies(serve: Serve, name: str) -> None:
    """A layer of the model predicts the token after the next (MTP), and most of what it predicts is rejected."""
    ours, theirs = (
        serve(NEWEST, *DRAFTING, **asked)["served"][name] for asked in ({"ATTN_BACKENDS_VLLM": "TORCH_MLA"}, {})
    )
    assert (ours["impls"], theirs["impls"]) == (["CPU_MLA__TORCH_MLA_Impl"], ["CPUMLAImpl"])
    assert ours["tokens"] == theirs["tokens"]
    assert apart(ours, theirs) < 1e-5


@long
def test_a_third_partys_backend_refuses_what_it_does_not_declare(serve: Serve) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"NAIVE cannot serve .* in vLLM: window: got window_left=39"):
        serve(NEWEST, "one group", ATTN_BACKENDS_VLLM="NAIVE")


@long
def test_a_third_partys_backend_serves_what_it_declares(serve: Serve) -> None:
    ours = serve(NEWEST, "eager", ATTN_BACKENDS_VLLM="NAIVE")["served"]["eager"]
    assert ours["impls"] == ["CPU_ATTN__NAIVE_Impl"]
    assert ours["tokens"] == by_itself(serve, NEWEST)["served"]["eager"]["tokens"]


@long
def test_an_openai_request(folder: Path) -> None:
    """The command `vllm serve` answers it, as a user types it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(folder, NEWEST, ATTN_BACKENDS_VLLM="TORCH") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    # The command looks for the distribution vllm, which the CPU build is not: the docs say how it is named so.
    variables["PYTHONPATH"] += os.pathsep + str(folder / COMMAND)
    command = [
        str(ENVIRONMENT / "bin" / "vllm"), "serve", str(folder / SMOLLM2), "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--block-size", "32",
        "--served-model-name", SMOLLM2,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as out, subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            body = {"model": SMOLLM2, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            answer = _answer(f"http://127.0.0.1:{port}", body, server)
        finally:
            server.terminate()
    assert "Paris" in answer["choices"][0]["text"], log.read_text()[-3000:]
    assert "attn_backends: TORCH serves" in log.read_text()


def _answer(address: str, body: dict[str, object], server: subprocess.Popen[bytes]) -> dict[str, Any]:
    ends = time.monotonic() + 400
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            break
        except OSError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < ends, "the server is not ready"
            time.sleep(2)
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())  # type: ignore[no-any-return]
