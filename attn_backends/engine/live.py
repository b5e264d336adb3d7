"""Requests between prompt and output, each with its text as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attn_backends.engine.detokenizer import Detokenizer
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
