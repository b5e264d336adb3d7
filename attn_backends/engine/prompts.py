"""What a caller gives to `LLM.generate`: checked before anything runs, and nothing of it cut or converted in silence.

What is of the wrong type is the caller's mistake and raises, with its place. A prompt of the right type that cannot be
served (text that is none, an id that the vocabulary has not) fails alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from attn_backends.engine.config import SamplingParams
from attn_backends.engine.outputs import Prompt


def check_prompts(prompts: Any) -> list[Prompt]:
    """Prompts as texts and lists of token ids, which may come as NumPy arrays or tensors.

    Raises:
        TypeError: something else; says which.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is one string; pass a list: generate([prompt])")
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is {_word(prompts)}; pass a list of texts, or of lists of token ids")
    return [_prompt(index, prompt) for index, prompt in enumerate(prompts)]


def check_sampling(sampling: Any, default: SamplingParams, num_prompts: int) -> Sequence[SamplingParams]:
    """Sampling parameters for each prompt.

    Raises:
        TypeError: they are none.
        ValueError: there are not as many as prompts.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or default] * num_prompts
    if isinstance(sampling, str | bytes) or not isinstance(sampling, Sequence):
        raise TypeError(f"sampling is {_word(sampling)}; pass SamplingParams, one for all or a list of one a prompt")
    for index, each in enumerate(sampling):
        if not isinstance(each, SamplingParams):
            raise TypeError(f"sampling[{index}] is {_word(each)}; pass SamplingParams(…)")
    if len(sampling) != num_prompts:
        raise ValueError(f"{len(sampling)} sampling parameters for {num_prompts} prompts: pass one, or one a prompt")
    return sampling


def why_not_text(text: str) -> str | None:
    """What is wrong with a text that cannot be UTF-8, in words; None for any other.

    >>> why_not_text("so \\ud800")
    'the prompt is no valid text: a lone surrogate, U+D800, at character 3; remove it'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"the prompt is no valid text: a lone surrogate, U+{ord(text[error.start]):04X}, at character "
            f"{error.start}; remove it"
        )
    return None


def why_not_served(token_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> str | None:
    """Which token id is none of the vocabulary's, in words; None if all are."""
    for what, ids in (("token id", token_ids), ("stop token id", params.stop_token_ids)):
        unknown = [] if not ids else [token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size]
        if unknown:
            return f"{what} {unknown[0]} is not in the vocabulary: ids are 0 to {vocab_size - 1}"
    return None


def _prompt(index: int, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, bytes | bytearray):
        raise TypeError(f"prompts[{index}] is {_word(prompt)}; decode it to text: prompt.decode()")
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of an array or a tensor
    if not isinstance(values, Sequence):
        raise TypeError(f"prompts[{index}] is {_word(prompt)}; a prompt is a text or a list of token ids")
    if set(map(type, values)) == {int}:  # as most are, and quickly known
        return list(values)
    return [_token_id(f"prompts[{index}][{place}]", value) for place, value in enumerate(values)]


def _token_id(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {_word(value)}; a token id is an integer")


def _word(value: object) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:37] + '…'} ({type(value).__name__})"
