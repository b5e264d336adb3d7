"""What a caller gives to `LLM.generate`: checked before anything runs, and nothing of it cut or converted in silence.

What is of the wrong type is the caller's mistake and raises, with its place. A prompt of the right type that cannot be
served (text that is none, an id that the vocabulary has not) fails alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from attn_backends.engine.config import SamplingParams, SchedulerConfig
from attn_backends.engine.outputs import Prompt
from attn_backends.engine.page_allocator import PageAllocator


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


def why_never(length: int, config: SchedulerConfig, pool: PageAllocator, max_model_len: int) -> str | None:
    """What stops a prompt of so many tokens from ever getting a new one, and what to change; None if nothing does."""
    pool_tokens, step_tokens = pool.num_pages * pool.page_size, config.max_num_tokens
    if length == 0:
        return "the prompt is empty: give at least one token"
    if length >= max_model_len:
        shorten = f"shorten the prompt to {max_model_len - 1}, or " if max_model_len > 1 else ""
        return (
            f"the prompt has {length} tokens and a request may have {max_model_len}, new ones included: {shorten}"
            "raise scheduler.max_model_len if the model can"
        )
    if length >= pool_tokens:
        return (
            f"the prompt has {length} tokens; with one new token it needs {pool.pages_for(length + 1)} pages "
            f"of {pool.page_size}, and the pool has {pool.num_pages}: raise cache.memory or "
            f"cache.num_pages, or shorten the prompt to {pool_tokens - 1}"
        )
    if length > step_tokens and not config.chunked_prefill:
        return (
            f"the prompt has {length} tokens and a step takes {step_tokens}: turn scheduler.chunked_prefill on, "
            f"raise scheduler.max_num_tokens to {length}, or shorten the prompt"
        )
    return None


def render_prompt(tokenizer: Any, text: str, chat: bool | None) -> Prompt:
    """`LLM.render_prompt` with a tokenizer of transformers."""
    if not isinstance(text, str):
        raise TypeError(f"text is {text!r}; a user's message is a str")
    template = tokenizer.chat_template
    if chat and not template:
        raise ValueError("this model has no chat template: use chat=False (--raw)")
    if chat is False or not template or not text.strip() or why_not_text(text):
        return text.strip() and text
    messages = [{"role": "user", "content": text}]
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [int(token_id) for token_id in token_ids]


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
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {_word(value)}; a token id is an integer")


def _word(value: object) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:37] + '…'} ({type(value).__name__})"
