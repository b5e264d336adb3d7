"""Logits to tokens: greedy, temperature, top-k, top-p. Each request has random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import gcd, isfinite

import torch

from attn_backends.engine.config import SamplingParams
from attn_backends.engine.request import Request

MOST_IN_BLOCK, LEAST_IN_BLOCK = 512, 64  # of a row of logits
NOT_FINITE = (
    "logits are not finite; check the model's weights and dtype (float16 overflows where bfloat16 and float32 do not), "
    "or try another backend"
)
FEW, MORE = 256, 16  # a nucleus is looked for among 256 tokens, then 16 times as many: a whole sort is slow


class Sampler:
    """Draws one token a row.

    The n-th token of a request uses one uniform number, a hash of its seed and n (without a seed: of the engine's seed,
    the request's id and n). So tokens do not depend on the batch, and a request that was preempted goes on as it was.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """One token for each row of `logits` [len(requests), vocab], any float dtype, any device.

        Raises:
            FloatingPointError: a row has no finite largest logit (NaN, +inf, or all -inf); its request is named.
        """
        tokens, largest = self.choose(logits, requests)
        ((chosen, lost),) = PendingTokens([tokens], [largest]).wait()
        if lost:
            names = ", ".join(repr(requests[row].request_id) for row in lost[:5])
            raise FloatingPointError(f"request {names} ({len(lost)} of {len(requests)} rows): {NOT_FINITE}")
        return chosen

    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], num_ahead: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [num_rows] i64, and the largest logits [num_rows]: where one is not finite, the token means nothing.

        Both are on the device, and any token is one of the vocabulary. Greedy rows, and rows without top-k and top-p,
        are chosen without reading it.

        Args:
            num_ahead: tokens already chosen for these requests that they do not hold yet.
        """
        if len(requests) != len(logits):
            raise ValueError(f"logits have {len(logits)} rows for {len(requests)} requests: pass one row a request")
        largest, tokens = _largest(logits)
        drawn = [row for row, request in enumerate(requests) if not request.is_greedy]
        if drawn:
            rows = _on(logits.device, drawn, torch.int64)
            shifted = logits[rows].float().sub_(largest[rows, None].float())  # largest is 0: nothing below can overflow
            tokens[rows] = self._draw(shifted, [requests[row] for row in drawn], num_ahead)
        return tokens, largest

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request], num_ahead: int) -> torch.Tensor:
        """Tokens [num_rows] i64 from float32 logits whose largest is 0, which are overwritten.

        By inversion of the cumulative distribution, in the order of the vocabulary.
        """
        params, (_, vocab), device = [request.sampling for request in requests], logits.shape, logits.device
        temperatures = _on(device, [p.temperature for p in params], torch.float32)
        # In place: fresh arrays of this size cost more in page faults than the arithmetic does.
        weights = logits.div_(temperatures.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).exp_()
        limited = [row for row, p in enumerate(params) if p.top_p < 1 or (p.top_k or vocab) < vocab]
        if limited:
            at = _on(device, limited, torch.int64)
            some = weights[at]
            weights[at] = some.masked_fill_(some < _thresholds(some, [params[row] for row in limited]), 0)
        cumulative = weights.double().cumsum_(-1)  # [num_rows, vocab]
        total = cumulative[:, -1:]
        uniform = _on(device, [self._uniform(r, num_ahead) for r in requests], torch.float64)[:, None]
        # Below the total even after rounding: the first entry above it always has a weight of its own.
        height = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        # Where the weights are NaN, the end is found: it may be the next step's token before anyone sees it.
        return torch.searchsorted(cumulative, height, right=True)[:, 0].clamp_(max=vocab - 1)

    def _uniform(self, request: Request, num_ahead: int) -> float:
        """A number in [0, 1) of 53 bits."""
        seed = request.sampling.seed
        stream = f"engine {self.seed} request {request.request_id}" if seed is None else f"seed {seed}"
        digest = blake2b(f"{stream} token {request.num_output_tokens + num_ahead}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row and the first place of it; NaN counts as largest.

    On a CPU blocks of a row come first: torch looks for a place one number at a time, and for a largest by vectors.
    """
    block = gcd(logits.shape[-1], MOST_IN_BLOCK)
    if logits.device.type != "cpu" or block < LEAST_IN_BLOCK:
        largest, tokens = logits.max(dim=-1)
        return largest, tokens
    blocks = logits.unflatten(-1, (-1, block))
    largest, first = blocks.amax(-1).max(-1)
    return largest, first * block + blocks[torch.arange(len(logits), device="cpu"), first].max(-1).indices


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """[len(values)] on the device, which nobody waits for: `torch.tensor(values, device=device)` would."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def _thresholds(
    weights: torch.Tensor, params: Sequence[SamplingParams], num_candidates: int = FEW
) -> torch.Tensor:  # [num_rows, 1]
    """The least weight in the top-k and then in the nucleus (top-p) of what is left; weights [num_rows, vocab] f32.

    A weight and not a set of tokens: ties are kept, so the outcome does not hang on the order equals are sorted in.
    """
    vocab, device = weights.shape[1], weights.device
    top_k = [min(p.top_k or vocab, vocab) for p in params]
    num_candidates = min(vocab, max([num_candidates, *(k for k in top_k if k < vocab)]))
    k = _on(device, top_k, torch.int64)[:, None]  # [num_rows, 1]
    p = _on(device, [p.top_p for p in params], torch.float64)[:, None]
    largest = weights.topk(num_candidates).values  # [num_rows, num_candidates], descending
    cumulative = largest.cumsum(-1, dtype=torch.float64)
    in_top_k = cumulative.gather(1, k.clamp(max=num_candidates) - 1)
    goal = p * torch.where(k < vocab, in_top_k, weights.sum(-1, keepdim=True, dtype=torch.float64))
    kept = (cumulative - largest < goal) & (torch.arange(num_candidates, device=device) < k)
    thresholds = largest.gather(1, kept.sum(-1, keepdim=True) - 1)
    short = [row for row, is_short in enumerate((cumulative[:, -1:] < goal).flatten().tolist()) if is_short]
    if short and num_candidates < vocab:
        thresholds[short] = _thresholds(weights[short], [params[row] for row in short], MORE * num_candidates)
    return thresholds


class PendingTokens:
    """Sampled tokens on their way to the host, behind what the device has been given so far.

    The device may run what it is given afterwards before anyone waits: the copies go to pinned memory.

    Args:
        tokens: [num_rows] i64 of each step, as `Sampler.choose` returns them.
        largest: [num_rows] of each step, likewise.
    """

    def __init__(self, tokens: Sequence[torch.Tensor], largest: Sequence[torch.Tensor]) -> None:
        self._tokens, self._largest = _to_host(tokens), _to_host(largest)  # [num_steps, num_rows]
        self._arrived: torch.cuda.Event | None = None
        if tokens[0].is_cuda and len(tokens[0]):  # nobody waits for none
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[tuple[list[int], list[int]]]:
        """For each step the tokens of all rows, and the rows whose largest logit is not finite: their tokens, and those
        that follow, mean nothing."""
        if self._arrived:
            self._arrived.synchronize()
        steps = zip(self._tokens.tolist(), self._largest.tolist(), strict=True)
        return [(tokens, _not_finite(largest)) for tokens, largest in steps]


def _not_finite(largest: Sequence[float]) -> list[int]:
    return [] if all(map(isfinite, largest)) else [row for row, logit in enumerate(largest) if not isfinite(logit)]


def _to_host(steps: Sequence[torch.Tensor]) -> torch.Tensor:
    """[num_steps, num_rows], in pinned memory once the device has come so far; on a CPU as it is."""
    rows = steps[0][None] if len(steps) == 1 else torch.stack(tuple(steps))
    if not rows.is_cuda:
        return rows
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)
