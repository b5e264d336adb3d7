"""What the engine hands out: finished requests, pieces of text, and the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Prompt = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True)
class RequestOutput:
    """One prompt's result."""

    index: int  # of the prompt
    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length", "abort" or "error"
    error: str | None = None


@dataclass(frozen=True)
class TextChunk:
    """What one prompt gained since its last chunk. `output` is set on its last."""

    index: int
    text: str
    output: RequestOutput | None = None


@dataclass
class Stats:
    """Figures of one `generate` or `stream` call."""

    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_steps: int = 0
    num_graph_steps: int = 0  # of them, replayed from graphs
    seconds: float = 0.0
    peak_pages: int = 0
    num_pages: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / self.seconds if self.seconds else 0.0


class Report(Protocol):
    """Takes what is being done while that takes long; `done` of `total` parts where they are known."""

    def __call__(self, message: str, done: int = 0, total: int | None = None) -> None: ...


def silent(message: str, done: int = 0, total: int | None = None) -> None:
    """The report that nobody reads."""
