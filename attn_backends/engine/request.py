"""One request on its way through the engine: its tokens, its pages, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from attn_backends.batch.page_table import IntArray
from attn_backends.engine.config import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, eq=False)
class Request:
    """Mutable; the scheduler writes it, others read it. Compared by identity.

    Raises:
        TypeError, ValueError: `cache_salt` is no string, or an empty one.
    """

    request_id: str
    token_ids: list[int]  # the prompt's at first (copied); new ones are appended
    sampling: SamplingParams
    priority: int = 0  # the lowest number is served first
    cache_salt: str | None = None  # it shares prefix pages with requests of an equal salt alone
    arrival: int = field(default=-1, init=False)  # given by the scheduler; breaks ties of priority
    num_prompt_tokens: int = field(init=False)
    is_greedy: bool = field(init=False)  # its tokens are the most likely ones: no randomness
    last_len: int = field(default=0, init=False)  # with so many tokens it ends; given by the scheduler
    num_computed_tokens: int = field(default=0, init=False)  # tokens whose keys and values are in the cache
    page_digests: list[bytes] = field(default_factory=list, init=False)  # of full pages of token_ids, as far as known
    num_published_pages: int = field(default=0, init=False)  # of its first pages, that the prefix cache knows
    num_prefix_hit_tokens: int = field(default=0, init=False)  # of the prompt, found in the prefix cache
    num_pages: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)  # why, if finish_reason is "error"
    _page_buffer: IntArray = field(default_factory=lambda: np.empty(8, np.int32), init=False, repr=False)

    def __post_init__(self) -> None:
        check_salt(self.cache_salt)
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.is_greedy = self.sampling.temperature == 0 or self.sampling.top_k == 1

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy: what was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not in the cache: 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Requests are served in this order, and preempted from its end."""
        return self.priority, self.arrival

    @property
    def page_ids(self) -> IntArray:
        """Its pages in order [num_pages] i32: a view, good until pages are added or cleared."""
        return self._page_buffer[: self.num_pages]

    def add_pages(self, pages: IntArray) -> None:
        """Append pages; the buffer doubles when it is full."""
        count = self.num_pages + len(pages)
        if count > len(self._page_buffer):
            grown = np.empty(max(count, 2 * len(self._page_buffer)), np.int32)
            grown[: self.num_pages] = self.page_ids
            self._page_buffer = grown
        self._page_buffer[self.num_pages : count] = pages
        self.num_pages = count

    def clear_cache(self) -> None:
        """Forget all pages, as if nothing had been computed; tokens and digests stay."""
        self.num_pages = 0
        self.num_computed_tokens = 0
        self.num_published_pages = 0


def check_salt(cache_salt: str | None) -> None:
    """Refuses a cache salt that is no string, and an empty one, which keeps nobody apart.

    Raises:
        TypeError, ValueError: as above; the message says what to pass.
    """
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(
            f"cache_salt is {cache_salt!r} of type {type(cache_salt).__name__}; pass a string, or None to share "
            "prefixes with all requests that have none"
        )
    if cache_salt == "":
        raise ValueError("cache_salt is empty: requests with an unset name would share pages; pass a name, or None")


def salts_for(cache_salt: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    """The cache salt of each prompt, [num_prompts]: the one for all, or those given one a prompt.

    Raises:
        TypeError, ValueError: not one a prompt, or one of them is refused.
    """
    if isinstance(cache_salt, Sequence) and not isinstance(cache_salt, (str, bytes)):
        salts = list(cache_salt)
    else:
        salts = [cache_salt] * num_prompts
    if len(salts) != num_prompts:
        raise ValueError(f"{len(salts)} cache salts for {num_prompts} prompts: pass one, or one a prompt")
    for salt in salts:
        check_salt(salt)
    return salts
