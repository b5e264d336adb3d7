"""What SGLang loads, by the entry point `attn_backends` of the group `sglang.srt.plugins`: names, and nothing else.

Every backend of ours becomes an attention backend of SGLang: `--attention-backend attn_backends_triton`. Which one
serves, and whether it can, is asked when a model's runner makes it.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_backends.adapters.engine_version import check_engine_version
from attn_backends.interface.contract import check_contract
from attn_backends.registry import AUTO, backends

if TYPE_CHECKING:
    from attn_backends.adapters.sglang.backend import SGLangAttention

PREFIX = "attn_backends_"
OPTIONS = "ATTN_BACKENDS_SGLANG_OPTIONS"  # a backend's own options, as JSON


def register() -> None:
    """Add our names to those that SGLang knows, for models and for drafts. Called again, it changes nothing.

    Raises:
        UntestedEngine: SGLang is older or newer than the adapter knows.
    """
    check_contract("the SGLang adapter", (1, 0))
    check_engine_version("sglang", "0.5.14", "0.5.23")  # these two were run, the others compared by their signatures
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    names = {PREFIX + name.lower(): name for name in (*backends, AUTO)}
    for name, ours in names.items():
        register_attention_backend(name)(partial(make_backend, ours))
    for kind in ("", "DRAFT_"):  # 0.5.14 has no list for drafts
        known = getattr(server_args, f"{kind}ATTENTION_BACKEND_CHOICES", None)
        if known is not None:
            known.extend(name for name in names if name not in known)


def make_backend(name: str, runner: Any) -> SGLangAttention:
    """SGLang's factory of a backend: called with a model's runner, once its weights and its pools are there."""
    from attn_backends.adapters.sglang.backend import SGLangAttention

    return SGLangAttention(name, runner, read_options())


def read_options() -> dict[str, Any]:
    """The backend's options from the environment.

    Raises:
        ValueError: they are no JSON object.
    """
    text = os.environ.get(OPTIONS, "{}")
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{OPTIONS} is {text!r}, which is no JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(
            f'{OPTIONS} is {text!r}; it holds a backend\'s options by name, as \'{{"tensor_cores": "on"}}\''
        )
    return options
