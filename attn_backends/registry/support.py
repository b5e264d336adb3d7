"""What each backend can do, and whether it can do it here: data for the `list` and `doctor` commands."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from attn_backends.registry.table import (
    BackendEntry,
    BackendImportError,
    backends,
    get_backend,
    get_class,
    installed_version,
)

if TYPE_CHECKING:
    from attn_backends.interface.capabilities import Capabilities


@dataclass(frozen=True)
class Support:
    """One backend on this machine."""

    name: str
    package: str | None
    version: str | None  # None: not installed
    usable: bool
    device: str | None  # torch device type that it runs on here
    reason: str | None  # why it is not usable
    fix: str | None  # the command that makes it so, if one does
    capabilities: dict[str, Any] | None  # plain values; None if its class cannot be imported
    ran: str = "not run"  # where `verify` ran it, and how many of its declared values and pairs of values did

    @property
    def why_not(self) -> str:
        """What keeps it from being used, and what to type."""
        return f"{self.name} cannot be used here: {self.reason}{f'; try: {self.fix}' if self.fix else ''}"


def support(entry: BackendEntry) -> Support:
    """Import a backend and ask what it needs of a device. A failing import is a reason, not an error."""
    package = entry.package
    version = installed_version(package) if package else None
    try:
        can = get_backend(entry.name).capabilities()
    except BackendImportError as error:
        known = plain(get_class(entry).capabilities()) if entry.module or entry.probe else None
        return Support(entry.name, package, version, False, None, error.reason, error.fix, known, ran(entry.name))
    import torch

    from attn_backends.interface.capabilities import gpu_mismatches

    device = next((device for device in devices_here() if device in can.devices), None)
    reason: str | None = f"needs a device of type {' or '.join(sorted(can.devices))}; here: {', '.join(devices_here())}"
    if device:
        reason = next((str(found) for found in gpu_mismatches(can, torch.device(device))), None)
    return Support(entry.name, package, version, reason is None, device, reason, None, plain(can), ran(entry.name))


def all_support() -> list[Support]:
    """`support` of every known backend."""
    return [support(entry) for entry in backends.values()]


def ran(name: str) -> str:
    """Machines that ran a backend's declared values, and how many of them; benchmarks/correctness/what_ran.py makes
    the file."""
    lines = [_ran(each) for each in _runs().get(name, ())]
    return "; ".join(lines) or "not run"


def _ran(found: dict[str, Any]) -> str:
    where = found["machine"].removeprefix("NVIDIA ") + (f", {found['provider']}" if found["provider"] else "")
    if "values" not in found:
        return f"{where}: {found['cases']} cases"
    values, pairs = (f"{found[f'{name}_run']} of {found[name]} {name}" for name in ("values", "pairs"))
    return f"{where}: {values}, {pairs}"


@cache
def _runs() -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = json.loads(resources.files(__package__).joinpath("ran.json").read_text())
    return runs


def plain(capabilities: Capabilities) -> dict[str, Any]:
    """Capabilities as values that JSON has: sets are sorted lists, dtypes and enums their names, None is any value."""
    return {field.name: _plain(getattr(capabilities, field.name)) for field in fields(capabilities)}


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value).removeprefix("torch.")


def devices_here() -> list[str]:
    """Torch device types of this machine, an accelerator first."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [accelerator.type, "cpu"] if accelerator else ["cpu"]


def choose_device(row: Support, asked: str) -> str:
    """The device to try a backend out on: `asked`, or for "auto" one of this machine that it runs on.

    Raises:
        ValueError: this machine has no such device, or the backend does not run on it.
    """
    import torch

    if asked == "auto" and row.device:
        return row.device
    try:
        kind = torch.empty(0, dtype=torch.uint8, device=asked).device.type
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise ValueError(
            f"--device {asked!r} cannot be used here ({cause}); here: {', '.join(devices_here())}"
        ) from error
    runs_on = row.capabilities["devices"] if row.capabilities else []
    if kind not in runs_on:
        raise ValueError(f"{row.name} does not run on {kind}; it runs on: {', '.join(runs_on)}")
    return asked
