"""Requests between prompt and output, each with its text as it grows, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from attn_backends.engine.outputs import Prompt, RequestOutput, TextChunk
from attn_backends.engine.request import Request


@dataclass
class LiveRequest:
    """A request that a caller waits for, and its text."""

    index: int  # of the prompt
    prompt: Prompt
    request: Request
    detokenizer: Detokenizer

    def add(self, token: int) -> str:
        """The text that one token adds. A token that ends the text is not part of it."""
        return "" if self.request.finish_reason == "stop" else self.detokenizer.add(token)

    def output(self) -> RequestOutput:
        request, text = self.request, self.detokenizer.text
        reason = request.finish_reason or "abort"
        return RequestOutput(self.index, self.prompt, text, tuple(request.output_token_ids), reason, request.error)


class LiveRequests:
    """The requests of one `generate` or `stream` call that have not been handed out whole."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}  # by request id
        self._streaming: dict[str, LiveRequest] = {}  # live ones whose text is looked at token by token
        self._finished: list[Request] = []  # live ones that have ended

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    @property
    def have_ended(self) -> bool:
        """Whether some have ended, whose last chunks `take_finished` gives."""
        return bool(self._finished)

    def add(self, item: LiveRequest, is_streaming: bool) -> None:
        """One more. Unless it is streaming, its tokens become text all at once when it has ended."""
        self._live[item.request.request_id] = item
        if is_streaming:
            self._streaming[item.request.request_id] = item

    def end(self, request: Request) -> None:
        """Take notice that a request has ended."""
        self._finished.append(request)

    def streaming(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[tuple[LiveRequest, int]]:
        """Requests whose new token is looked at, with it. Ask before `update`: what has ended gets no more."""
        if not self._streaming:
            return []
        pairs = zip(requests, tokens, strict=True)
        return [
            (self._streaming[request.request_id], token)
            for request, token in pairs
            if not request.finish_reason and request.request_id in self._streaming
        ]

    def take_finished(self) -> Iterator[TextChunk]:
        """The last chunk of each request that has ended, in the order of prompts."""
        finished = [self._live[request.request_id] for request in self._finished]
        self._finished.clear()
        for item in sorted(finished, key=lambda item: item.index):
            request = item.request
            del self._live[request.request_id]
            if self._streaming.pop(request.request_id, None) is None:
                ends_with_token = request.finish_reason == "stop"
                item.detokenizer.keep(request.output_token_ids[: -1 if ends_with_token else None])
            yield TextChunk(item.index, item.detokenizer.finish(), item.output())

    def clear(self) -> None:
        for kept in (self._live, self._streaming, self._finished):
            kept.clear()


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
