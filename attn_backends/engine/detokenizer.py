"""Token ids to text as they arrive: no half characters, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """One request's text. `add` returns what is safe to show; `finish` what was held back.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: strings that end the text; the first to appear cuts it, and `stopped` turns true.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.text = ""  # everything shown so far
        self.stopped = False
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""  # could be the beginning of a stop string
        self._token_ids: list[int] = []
        self._decoded = ""

    def add(self, token_id: int) -> str:
        """The new text that is safe to show after one more token; often empty inside a character."""
        self._token_ids.append(token_id)
        new = self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
        self._decoded += new
        return self._show(new)

    def finish(self) -> str:
        """The rest: what was held back for a stop string or an unfinished character."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        tail = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        shown = self._show(tail) + ("" if self.stopped else self._held)
        self.text += "" if self.stopped else self._held
        self._held = ""
        return shown

    def _show(self, new: str) -> str:
        pending = self._held + new
        cuts = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if cuts:
            self.stopped = True
            shown, self._held = pending[: min(cuts)], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with.

    >>> _overlap("so <|e", "<|end|>")
    3
    """
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
