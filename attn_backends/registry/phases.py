"""The name of two backends that share a cache, one a phase: `prefill=X,decode=Y`, or both keys as a mapping."""

from __future__ import annotations

from collections.abc import Mapping

PHASES = ("prefill", "decode")
_TO_WRITE = "write prefill=NAME,decode=NAME, each the name of one backend"


def phases_of(name: str) -> tuple[str, str] | None:
    """The names of both phases' backends in upper case, of prefill and of decode; None for the name of one backend.

    Raises:
        ValueError: a phase is missing, unknown or given twice, or AUTO is to choose for it.

    >>> phases_of("decode=triton, prefill=FLASH_ATTN")
    ('FLASH_ATTN', 'TRITON')
    """
    if "=" not in name:
        return None
    pairs = [part.partition("=") for part in name.split(",")]
    given = {phase.strip().lower(): backend.strip().upper() for phase, _, backend in pairs}
    if len(pairs) != 2 or given.keys() != set(PHASES):
        raise ValueError(f"backend {name!r}: {_TO_WRITE}")
    if not all(given.values()) or "AUTO" in given.values():
        raise ValueError(f"backend {name!r}: {_TO_WRITE}; AUTO alone, for both, may choose two")
    return given["prefill"], given["decode"]


def phased_name(prefill: str, decode: str) -> str:
    """The name of a pair, as the registry has it.

    >>> phased_name("TRITON", "FLASHINFER")
    'PREFILL=TRITON,DECODE=FLASHINFER'
    """
    return f"PREFILL={prefill},DECODE={decode}"


def name_of(backend: object) -> object:
    """A setting's `{prefill: X, decode: Y}` as one name; anything else as it is.

    Raises:
        ValueError: the keys are not these two, or a value is no name.
    """
    if not isinstance(backend, Mapping):
        return backend
    if set(backend) != set(PHASES) or not all(isinstance(name, str) and name for name in backend.values()):
        raise ValueError("allowed: a name, or the names of two backends, such as {prefill: TORCH, decode: TRITON}")
    return ",".join(f"{phase}={backend[phase]}" for phase in PHASES)
