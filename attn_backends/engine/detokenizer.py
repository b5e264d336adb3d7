"""Token ids to text as they arrive: no half characters, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """One request's text. `add` returns what is safe to show; `finish` what was held back.

    Who wants no pieces gives the tokens to `keep`: to decode them all at once costs a hundredth of one by one.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: strings that end the text; the first to appear cuts it, and `stopped` turns true.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.stopped = False
        self._backend = tokenizer.backend_tokenizer  # its own `decode` would tidy spaces up, as no stream can
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""  # could be the beginning of a stop string
        self._shown: list[str] = []
        self._token_ids: list[int] = []

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def add(self, token_id: int) -> str:
        """The new text that is safe to show after one more token; often empty inside a character."""
        self._token_ids.append(token_id)
        new = self._stream.step(self._backend, token_id)
        return self._show(new) if new else ""

    def keep(self, token_ids: Sequence[int]) -> None:
        """More tokens, whose text is left to `finish`. No `add` may follow."""
        self._token_ids.extend(token_ids)

    def finish(self) -> str:
        """The rest: what was held back for a stop string or an unfinished character, and what was kept."""
        if self.stopped:
            return ""
        decoded, whole = self.text + self._held, self._backend.decode(self._token_ids, skip_special_tokens=True)
        tail = whole[len(decoded) :] if whole.startswith(decoded) else ""
        shown = self._show(tail)
        self._shown.append(self._held)  # empty if it has stopped
        shown, self._held = shown + self._held, ""
        return shown

    def _show(self, new: str) -> str:
        if not self._stop:
            self._shown.append(new)
            return new
        pending = self._held + new
        cuts = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if cuts:
            self.stopped = True
            shown, self._held = pending[: min(cuts)], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self._shown.append(shown)
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with.

    >>> _overlap("so <|e", "<|end|>")
    3
    """
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
