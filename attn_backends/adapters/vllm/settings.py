"""What a user tells our backends in vLLM's configuration: `additional_config={"attn_backends": {"options": …}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "attn_backends"
_KNOWN = ("options",)


def options_from(vllm_config: Any) -> dict[str, Any]:
    """The `backend_options` in vLLM's configuration, not validated yet.

    Raises:
        ValueError: there is something else under our key.
    """
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get(KEY) or {} if isinstance(additional, Mapping) else {}
    unknown = [key for key in given if key not in _KNOWN]
    if unknown:
        raise ValueError(
            f"additional_config[{KEY!r}] has {', '.join(map(repr, unknown))}; known: {', '.join(_KNOWN)}. For example "
            f'--additional-config \'{{"{KEY}": {{"options": {{}}}}}}\''
        )
    return dict(given.get("options") or {})
