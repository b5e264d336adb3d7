"""All of lint, for one backend: what it was asked, in order, and the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel

from attn_backends.testing.lint.calls import check_lse, check_output, check_prefix
from attn_backends.testing.lint.features import check_features
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.graphs import check_graphs
from attn_backends.testing.lint.scales import check_layouts, check_scales, check_values
from attn_backends.testing.lint.stale import check_builders, check_host_aliases, check_states
from attn_backends.testing.lint.subject import Subject
from attn_backends.testing.lint.unread import Trace, check_code, check_options

CHECKS: Mapping[str, Callable[[Subject], Iterator[Finding]]] = {
    "features": check_features,
    "scales": check_scales,
    "declared values": check_values,
    "undeclared layouts": check_layouts,
    "lse": check_lse,
    "output": check_output,
    "common_prefix_len": check_prefix,
    "builders": check_builders,
    "host tensors": check_host_aliases,
    "states": check_states,
    "graphs": check_graphs,
}


@dataclass(frozen=True)
class LintReport:
    """What was asked of a backend, and what was found."""

    backend: str
    device: str
    seed: int
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "checks": [*self.checks], "findings": [asdict(found) for found in self.findings]}


def lint_backend(
    subject: Subject, options: type[BaseModel] | None = None, show: Callable[[str], None] = lambda check: None
) -> LintReport:
    """Run every check, then read the code.

    Args:
        subject: the backend, its device, and the seed of all chance.
        options: the backend's options model; its fields are traced over all of the checks.
        show: told each check's name before it begins.
    """
    trace = None if options is None else Trace(options)
    traced = subject if trace is None else replace(subject, options=trace.options())
    last: dict[str, Callable[[Subject], Iterator[Finding]]] = {
        "code": lambda _: check_code(subject.backend),
        "options": lambda _: check_options(subject.backend, trace),  # read by all before
    }
    found: dict[tuple[str, str], Finding] = {}
    checks = {**CHECKS, **last}
    for name, check in checks.items():
        show(name)
        for each in check(traced):
            found.setdefault((each.code, each.where), each)
    return LintReport(subject.name, subject.device, subject.seed, tuple(checks), tuple(found.values()))
