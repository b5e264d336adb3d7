"""End tokens of a model: its generation config's, else its tokenizer's; wrong ones and a damaged file are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_backends.engine.models.checkpoint import ModelError, read_json

GENERATION_CONFIG = "generation_config.json"


def check_generation_config(folder: Path) -> None:
    """A folder's generation config is whole, or there is none; transformers would pass over a damaged one.

    Raises:
        ModelError: it cannot be read, or is no JSON object.
    """
    file = folder / GENERATION_CONFIG
    if file.exists():
        read_json(file)


def end_tokens(model: Any, tokenizer: Any, vocab_size: int, folder: Path | None) -> frozenset[int]:
    """The end tokens of the model's generation config; the tokenizer's where it names none of the vocabulary: small
    models often have the number of their architecture's default, which they never sample.

    Args:
        folder: where the model was read from.

    Raises:
        ModelError: `eos_token_id` is no whole number, and no list of them.
    """
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = found if isinstance(found, list | tuple) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):  # True is an int too
        where = "the model's generation config" if folder is None else folder / GENERATION_CONFIG
        raise ModelError(
            f"{where}: eos_token_id is {found!r}; allowed: a whole number from 0 to {vocab_size - 1}, or a "
            "list of them. Correct it, or leave it out for the tokenizer's"
        )
    ids, own = [token for token in ids if 0 <= token < vocab_size], tokenizer.eos_token_id
    return frozenset(ids or ([] if own is None else [own]))
