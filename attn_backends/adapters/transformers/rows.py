"""The rows of a batch on the host: how many keys each has, and which of its tokens are padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attn_backends.adapters.transformers.refuse import decline
from attn_backends.batch.page_table import IntArray


@dataclass(frozen=True)
class RowTokens:
    """What one forward brings."""

    context_lens: IntArray  # [batch] i32, keys of each row before
    query_lens: IntArray  # [batch] i32, new tokens of each row that are no padding
    live: torch.Tensor | None  # [batch, num_tokens] bool, on the device of the mask; None: no padding among them

    @property
    def seq_lens(self) -> IntArray:  # [batch] i32
        return self.context_lens + self.query_lens


class Rows:
    """Rows of `seen` tokens each, padding included. Padding has no keys."""

    def __init__(self, batch: int) -> None:
        self.lens: IntArray = np.zeros(batch, np.int32)
        self.seen = 0
        self.live: torch.Tensor | None = None  # [batch, seen] bool, on the host; None: no padding so far

    def append(self, num_tokens: int, mask: torch.Tensor | None) -> RowTokens:
        """Take the tokens of a forward in.

        Args:
            mask: [batch, seen + num_tokens] bool, False where padding is; None: there is none.

        Raises:
            Unsupported: the mask is of another shape, or says other than before of tokens that were seen before.
        """
        batch, seen = len(self.lens), self.seen
        if mask is not None and mask.shape != (batch, seen + num_tokens):
            decline("attention_mask", f"shape {list(mask.shape)}", f"[batch, tokens], {[batch, seen + num_tokens]}",
                    "Pass 0 for padding, 1 for all other tokens so far; for other masks load with sdpa.")  # fmt: skip
        host = None if mask is None else mask.cpu()
        past = None if host is None else host[:, :seen]
        agrees = self.live is None if past is None else torch.equal(past, self._live())
        if not agrees:
            decline("attention_mask", "cached tokens that are masked now, or padding that is no longer",
                    "the mask that they were cached with", "Begin anew, without past_key_values.")  # fmt: skip
        if host is None or mask is None:
            query_lens, live = np.full(batch, num_tokens, np.int32), None
        else:
            query_lens = host[:, seen:].sum(1, dtype=torch.int32).numpy()
            live = None if query_lens.sum() == batch * num_tokens else mask[:, seen:]
            self.live = None if self.live is None and live is None else host
        new = RowTokens(self.lens.copy(), query_lens, live)
        self.lens, self.seen = new.seq_lens, seen + num_tokens
        return new

    @property
    def has_gaps(self) -> bool:
        """Whether padding stands between tokens of a row, so that places and keys count differently."""
        if self.live is None:
            return False
        rises = self.live[:, 1:] & ~self.live[:, :-1]
        return bool((rises.sum(1) + self.live[:, 0] > 1).any())

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens of all rows."""
        self.seen -= num_tokens
        if self.live is None:
            self.lens = self.lens - num_tokens
        else:
            self.lens = self.live[:, : self.seen].sum(1, dtype=torch.int32).numpy()
            self._keep(self.live[:, : self.seen])

    def select(self, rows: torch.Tensor) -> None:
        """Put rows in the place of others, as `index_select` does."""
        self.lens = self.lens[rows.cpu().numpy()]
        if self.live is not None:
            self._keep(self.live[rows.cpu()])

    def _keep(self, live: torch.Tensor) -> None:
        """Where padding is still; a row that had some may be gone, and its tokens too."""
        self.live = None if bool(live.all()) else live

    def _live(self) -> torch.Tensor:
        if self.live is not None:
            return self.live
        return torch.ones(len(self.lens), self.seen, dtype=torch.bool, device="cpu")
