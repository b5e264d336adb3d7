"""What a run of `attn-backends verify` found, as data, with all that is needed to repeat it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attn_backends.machine import cpu_model
from attn_backends.registry.user_table import installed_versions
from attn_backends.testing.verify.campaign import Tally
from attn_backends.testing.verify.covering import Planned
from attn_backends.testing.verify.pairs import counted
from attn_backends.testing.verify.sizes import default_size
from attn_backends.testing.verify.worker import Asked


def as_report(asked: Asked, tally: Tally, planned: Planned, seconds: float, package: str | None) -> dict[str, Any]:
    """The JSON that `--json` writes."""
    findings = [{**each, "command": repeat_command(asked, each["seed"])} for each in tally.findings]
    found: dict[str, dict[str, int]] = {}
    for name, value in tally.pairs.values:
        found.setdefault(name, {})[value] = tally.values[name, value]
    return {
        "command": shlex.join([*_environment(), "attn-backends", *map(_without_folder, sys.argv[1:])]),
        "backend": asked.name,
        "device": asked.device,
        "size": asked.size,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(asked.device),
        "versions": versions(package),
        "declared": asked.declared,
        "continued": planned.continued,
        "first_seed": planned.first_seed,
        "seconds": round(seconds, 1),
        "interrupted": tally.interrupted,
        "unfinished": tally.unfinished,
        "num_cases": tally.num_cases,
        "num_steps": tally.num_steps,
        "cases": dict(sorted(tally.cases.items())),
        "steps": dict(sorted(tally.steps.items())),
        "refused": dict(sorted(tally.refused.items())),
        "values": found,
        **counted(tally.pairs, planned.refused),
        "worst": {
            name: {"of_tolerance": round(error, 4), "seed": tally.worst_seeds[name]}
            for name, error in sorted(tally.worst.items())
        },
        "findings": findings,
    }


def _without_folder(word: str) -> str:
    """A file by its name: where it lies on this machine is nobody's business."""
    return Path(word).name if "/" in word else word


def repeat_command(asked: Asked, seed: int) -> str:
    """What to type to run one case again."""
    words = [*_environment(), "attn-backends", "verify", asked.name, *(["--declared"] if asked.declared else [])]
    words += ["--case", str(seed), "--device", asked.device]
    for words_of_a_factor in asked.where:
        words += ["--where", words_of_a_factor]
    if asked.size != default_size(asked.device):
        words += ["--size", asked.size]
    if asked.multiprocessors is not None:
        words += ["--multiprocessors", str(asked.multiprocessors)]
    for module in asked.imports:
        words += ["--import", module]
    return shlex.join(words)


def machine(device: str) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {"cpu": cpu_model(), "cores": os.cpu_count(), "gpu": None}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
    return found


def versions(package: str | None) -> dict[str, str | None]:
    """Versions of Python, CUDA, and the packages that matter here."""
    names = dict.fromkeys(["attn-backends", "torch", "triton", "numpy", *([package] if package else [])])
    return {"python": platform.python_version(), "cuda": torch.version.cuda} | installed_versions(names)


def _environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables without which the cases would be others."""
    return ["TRITON_INTERPRET=1"] if environ.get("TRITON_INTERPRET") == "1" else []
