"""Which keys a query sees, exactly.

With queries of zeros every visible key weighs the same, and with one-hot values each output element is the weight of
one key: 0 where the key is hidden, 1 / n where it is one of n. A tolerance cannot see one key of 2048; this can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import pytest
import torch

from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.cases import BatchShape, WindowCase, load_cases
from attn_backends.testing.cases.features import ENCODER, Feature, feature
from attn_backends.testing.cases.random_batch import with_freed_pages, with_pool
from attn_backends.testing.harness import assert_matches, make_layer, run_backend
from attn_backends.testing.kit.base import WHOLE_PROMPTS, KitBase
from attn_backends.testing.reference import sees


class Visibility(KitBase):
    def key_weights(self, spec: AttentionSpec, shape: BatchShape, first_keys: Sequence[int]) -> torch.Tensor:
        """Weights [num_tokens, num_qo_heads, len(first_keys) * head_dim_vo] of the keys in blocks from `first_keys`."""
        batch = self.make_batch(spec, shape)
        blocks = [batch.one_hot(first_key) for first_key in first_keys]
        if batch.pool is not None:  # each has one of its own
            blocks = [with_pool(block, self.backend) for block in blocks]
        layer = make_layer(self.backend, blocks[0])
        weights = [layer.forward(block, layer.begin(block)).output.float().cpu() for block in blocks]
        return torch.cat(weights, dim=-1)

    def check_visible(self, spec: AttentionSpec, shape: BatchShape) -> None:
        """Every query of the batch sees the keys it should and no other, each with the same weight."""
        width = spec.head_dim_vo
        weights = self.key_weights(spec, shape, range(0, max(shape.seq_lens), width))
        token = 0
        for seq_len, query_len in zip(shape.seq_lens, shape.query_lens, strict=True):
            for position in range(seq_len - query_len, seq_len):
                want = sees(spec, position, torch.arange(seq_len, device="cpu")).nonzero().flatten().tolist()
                for head in range(spec.num_qo_heads):
                    got = weights[token, head].nonzero().flatten().tolist()
                    assert got == want, (
                        f"the query at position {position} of {seq_len} (head {head}) sees {spans(got)}, "
                        f"not {spans(want)}: window_left {spec.window_left}, chunk_size {spec.chunk_size}, "
                        f"causal {spec.causal}"
                    )
                    seen = weights[token, head, want]
                    assert torch.allclose(seen, torch.full_like(seen, 1 / len(want)), rtol=1e-2), (
                        f"the query at position {position} weighs {len(want)} equal keys differently: {seen.tolist()}"
                    )
                token += 1

    @pytest.mark.parametrize("window_left", [0, 1, 15, 16, 17, 47])
    def test_window_edges(self, window_left: int) -> None:
        """Lengths around the window's and the pages' edges, one query and several."""
        spec = self.make_spec(window_left=window_left)
        if self.serves(spec):
            lengths = sorted({1, 16, 17, 33, 64, *(max(1, window_left + n) for n in (0, 1, 2, 18))})
            ones = (1,) * len(lengths)
            self.check_visible(spec, BatchShape(seq_lens=tuple(lengths), query_lens=ones))
            queries = tuple(min(n, 19) for n in lengths)
            self.check_visible(spec, BatchShape(seq_lens=tuple(lengths), query_lens=queries))
            for length in lengths:
                self.check_visible(spec, BatchShape(seq_lens=(length,), query_lens=(1,)))

    @pytest.mark.parametrize("case", load_cases().window, ids=lambda case: str(case.seq_len))
    def test_long_window_edges(self, case: WindowCase) -> None:
        """The worked cases of `cases.json`: the first and the last keys of a sequence as long as the window."""
        spec = self.make_spec(window_left=case.window_left)
        if self.serves(spec):
            width = spec.head_dim_vo
            for query_len in (1, 3):
                shape = BatchShape(seq_lens=(case.seq_len,), query_lens=(query_len,))
                last_query = self.key_weights(spec, shape, [0, case.seq_len - width])[-1]
                for head, weights in enumerate(last_query):
                    first, last = weights[:width].nonzero().flatten().tolist(), weights[width:]
                    assert first[:1] == [case.oldest_key_of_last_query], (
                        f"head {head} sees keys {spans(first)} of {case}"
                    )
                    assert bool(last.all()), f"head {head} does not see all of the last {width} keys of {case}"
                    if spec.dtype is torch.float32:
                        assert round(1 / float(last[-1])) == case.keys, f"{1 / float(last[-1])} keys share {case}"

    @pytest.mark.parametrize("chunk_size", [1, 7, 16, 24])
    def test_chunk_edges(self, chunk_size: int) -> None:
        spec = self.make_spec(chunk_size=chunk_size)
        if self.serves(spec):
            lengths = tuple(max(1, chunk_size * k + n) for k in (1, 2) for n in (-1, 0, 1))
            self.check_visible(spec, BatchShape(seq_lens=lengths, query_lens=(1,) * len(lengths)))
            self.check_visible(spec, BatchShape(seq_lens=lengths, query_lens=tuple(min(n, 9) for n in lengths)))

    @pytest.mark.parametrize("name", ["window_15", "window_47", "chunks"])
    def test_freed_pages(self, name: str) -> None:
        """An engine has freed those that no query of the step sees, and its tables have one page of NaN in their
        place."""
        asked = Feature(name, ("window",), {"window_left": 47}) if name == "window_47" else feature(name)
        for _, spec in self.served([asked]):
            for query_lens in ((1, 1, 1, 1), (4, 2, 3, 4), (1, 1, 20, 35), (60, 20, 17, 33)):
                batch = self.make_batch(
                    spec, BatchShape(seq_lens=(70, 64, 130, 301), query_lens=query_lens), poison=math.nan
                )
                assert_matches(run_backend(self.backend, with_freed_pages(batch)), batch)

    @pytest.mark.parametrize("name", ["plain", "non_causal", "non_causal_window"])
    def test_future_keys(self, name: str) -> None:
        for _, spec in self.served([feature(name)]):
            for shape in (BatchShape(seq_lens=(1, 16, 33, 40), query_lens=(1, 1, 5, 24)), WHOLE_PROMPTS):
                self.check_visible(spec, shape)

    def test_encoder_sees_everything(self) -> None:
        for _, spec in self.served([ENCODER]):
            self.check_visible(spec, WHOLE_PROMPTS)


def spans(keys: Sequence[int]) -> str:
    """[0, 1, 2, 7] as "0-2, 7"."""
    runs = [[key for _, key in run] for _, run in groupby(enumerate(keys), lambda at: at[1] - at[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "no key"
