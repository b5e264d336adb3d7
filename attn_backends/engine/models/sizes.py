"""Whether a model's config has sizes that a model can have: asked before anything of these sizes is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The largest of each that is taken for a size and not for an error; published models stay far below.
LIMITS = {
    "num_hidden_layers": 4096, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "head_dim": 1 << 16,
    "hidden_size": 1 << 24, "intermediate_size": 1 << 24, "vocab_size": 1 << 28, "max_position_embeddings": 1 << 31,
}  # fmt: skip


def why_not_sizes(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the sizes of a language model's config, in words; None for possible ones.

    A size that is absent, None or a list (one a layer) is left to the model's own code.

    >>> why_not_sizes({"num_attention_heads": 5, "num_key_value_heads": 2})
    'num_attention_heads is 5 and num_key_value_heads 2: the first must be a multiple of the second'
    """
    given = {name: config[name] for name in LIMITS if config.get(name) is not None}
    sizes = {name: value for name, value in given.items() if not isinstance(value, list)}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LIMITS[name]:
            return f"{name} is {size!r}; allowed: a whole number from 1 to {LIMITS[name]}"
    divisions = [("num_attention_heads", "num_key_value_heads")]
    if config.get("head_dim") is None and not config.get("kv_lora_rank"):
        divisions.append(("hidden_size", "num_attention_heads"))
    for many, few in divisions:
        if many in sizes and few in sizes and sizes[many] % sizes[few]:
            return f"{many} is {sizes[many]} and {few} {sizes[few]}: the first must be a multiple of the second"
    return None
