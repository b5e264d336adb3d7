"""Logits to tokens: greedy, temperature, top-k, top-p. Each request has random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from attn_backends.config import SamplingParams
from attn_backends.engine.request import Request

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
        tokens, finite = self.choose(logits, requests)
        check_finite(finite, requests)
        return tokens.tolist()

    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], num_ahead: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [num_rows] i64, and whether their logits were finite [num_rows] bool: a token is 0 if they were not.

        Both are on the device. Greedy rows, and rows without top-k and top-p, are chosen without reading it.

        Args:
            num_ahead: tokens already chosen for these requests that they do not hold yet.
        """
        if len(requests) != len(logits):
            raise ValueError(f"logits have {len(logits)} rows for {len(requests)} requests: pass one row a request")
        largest, tokens = logits.max(dim=-1, keepdim=True)  # [num_rows, 1]; NaN counts as largest
        drawn = [row for row, request in enumerate(requests) if not _is_greedy(request.sampling)]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            shifted = logits[rows].float().sub_(largest[rows].float())  # largest is 0: nothing below can overflow
            tokens[rows, 0] = self._draw(shifted, [requests[row] for row in drawn], num_ahead)
        finite = largest.isfinite()
        return tokens.masked_fill_(~finite, 0)[:, 0], finite[:, 0]

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request], num_ahead: int) -> torch.Tensor:
        """Tokens [num_rows] i64 from float32 logits whose largest is 0, which are overwritten.

        By inversion of the cumulative distribution, in the order of the vocabulary.
        """
        params, (_, vocab), device = [request.sampling for request in requests], logits.shape, logits.device
        temperatures = torch.tensor([p.temperature for p in params], device=device)
        # In place: fresh arrays of this size cost more in page faults than the arithmetic does.
        weights = logits.div_(temperatures.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).exp_()
        limited = [row for row, p in enumerate(params) if p.top_p < 1 or (p.top_k or vocab) < vocab]
        if limited:
            some = weights[limited]
            weights[limited] = some.masked_fill_(some < _thresholds(some, [params[row] for row in limited]), 0)
        cumulative = weights.double().cumsum_(-1)  # [num_rows, vocab]
        total = cumulative[:, -1:]
        uniform = torch.tensor([[self._uniform(r, num_ahead)] for r in requests], dtype=torch.float64, device=device)
        # Below the total even after rounding: the first entry above it always has a weight of its own.
        height = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
        return torch.searchsorted(cumulative, height, right=True)[:, 0]

    def _uniform(self, request: Request, num_ahead: int) -> float:
        """In [0, 1), 53 bits."""
        seed = request.sampling.seed
        stream = f"engine {self.seed} request {request.request_id}" if seed is None else f"seed {seed}"
        digest = blake2b(f"{stream} token {request.num_output_tokens + num_ahead}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.top_k == 1


def _thresholds(
    weights: torch.Tensor, params: Sequence[SamplingParams], num_candidates: int = FEW
) -> torch.Tensor:  # [num_rows, 1]
    """The least weight in the top-k and then in the nucleus (top-p) of what is left; weights [num_rows, vocab] f32.

    A weight and not a set of tokens: ties are kept, so the outcome does not hang on the order equals are sorted in.
    """
    vocab, device = weights.shape[1], weights.device
    top_k = [min(p.top_k or vocab, vocab) for p in params]
    num_candidates = min(vocab, max([num_candidates, *(k for k in top_k if k < vocab)]))
    k = torch.tensor(top_k, device=device)[:, None]  # [num_rows, 1]
    p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
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


def check_finite(finite: torch.Tensor, requests: Sequence[Request]) -> None:
    """Raise for rows whose tokens mean nothing.

    Args:
        finite: [num_rows] bool, as `Sampler.choose` returns it.

    Raises:
        FloatingPointError: a row has no finite largest logit; its request is named.
    """
    names = [request.request_id for request, fine in zip(requests, finite.tolist(), strict=True) if not fine]
    if names:
        raise FloatingPointError(
            f"logits of request {', '.join(map(repr, names[:5]))} are not finite ({len(names)} of {len(requests)} "
            "rows); check the model's weights and dtype (float16 overflows where bfloat16 and float32 do not), "
            "or try another backend"
        )
