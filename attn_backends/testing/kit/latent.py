"""What only backends of the MLA family are asked: widths of latent rows, context in chunks, absorbed verify steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends.cache.kv_cache import allocate_kv_cache
from attn_backends.registry import validate_options
from attn_backends.spec import KVCacheSpec, MLASpec
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import plain_cache
from attn_backends.testing.harness import assert_step, make_layer, run_backend
from attn_backends.testing.kit.base import WHOLE_PROMPTS, KitBase

# Prefill rows behind decodes. Their contexts are nothing, less than a chunk, several chunks, and shared out over some.
CONTEXTS = BatchShape(seq_lens=(9, 50, 31, 20, 90, 64, 12), query_lens=(1, 1, 11, 20, 9, 12, 10))
RANDOM_LAYERS = 12
LONG = BatchShape(seq_lens=(300, 270), query_lens=(20, 30))


class Latent(KitBase):
    def make_mla(self, **changes: Any) -> MLASpec:
        spec = self.make_spec(**changes)
        assert isinstance(spec, MLASpec)
        return spec

    def test_cache_is_latent(self) -> None:
        """One row a token, for all heads, and nothing beside it."""
        spec, cache = self.make_mla(), KVCacheSpec(3, self.page_size)
        pool = allocate_kv_cache(self.backend, {0: spec}, cache, self.device)
        assert pool.layers[0].key.shape == (3, self.page_size, spec.kv_lora_rank + spec.qk_rope_head_dim)
        assert pool.layers[0].key.is_contiguous()
        assert pool.num_bytes == cache.num_slots * spec.latent_dim * spec.cache_dtype.itemsize

    @pytest.mark.parametrize("num_qo_heads", [1, 3, 16, 128])
    def test_head_counts(self, num_qo_heads: int) -> None:
        spec = self.make_mla(num_qo_heads=num_qo_heads)
        if self.serves(spec, may_refuse=True):
            self.check(spec, ["small_decode", WHOLE_PROMPTS, BatchShape(seq_lens=(31,), query_lens=(11,))])

    @pytest.mark.parametrize(("kv_lora_rank", "qk_rope_head_dim"), [(512, 64), (256, 32), (512, 32), (16, 8)])
    def test_widths_of_latent_rows(self, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
        nope = self.make_mla().qk_nope_head_dim
        spec = self.make_mla(
            kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, head_dim=nope + qk_rope_head_dim
        )
        if self.serves(spec, may_refuse=True):
            self.check(spec, ["mixed_small", BatchShape(seq_lens=(40, 31), query_lens=(9, 11))])

    @pytest.mark.parametrize(("nope", "v_dim"), [(16, 40), (40, 16), (128, 64), (64, 128), (192, 256), (8, 8)])
    def test_widths_of_heads(self, nope: int, v_dim: int) -> None:
        """The part of a key that knows no positions, and the value, are as wide as the model wants each."""
        rope = self.make_mla().qk_rope_head_dim
        spec = self.make_mla(head_dim=nope + rope, head_dim_vo=v_dim)
        if self.serves(spec, may_refuse=True):
            self.check(spec, ["mixed_small", CONTEXTS], f"q_nope of {nope} and values of {v_dim}")

    @pytest.mark.parametrize("nth", range(RANDOM_LAYERS))
    def test_random_latent_layers(self, nth: int) -> None:
        """Heads, widths, scale, pages, rows and a shared prefix by chance."""
        numbers = Random(f"latent {nth}")
        can, drawn = self.can, numbers.choice
        rope = drawn(sorted(can.qk_rope_head_dims or {8, 16, 32, 64}))
        spec = self.make_mla(  # of the declared widths, where these are declared
            num_qo_heads=drawn(sorted(can.head_counts or {1, 2, 3, 4, 8, 16, 20})),
            kv_lora_rank=drawn(sorted(can.kv_lora_ranks or {16, 32, 64, 128})),
            qk_rope_head_dim=rope,
            head_dim=rope + drawn((8, 16, 24, 64, 128)),
            head_dim_vo=drawn((8, 16, 24, 64, 128)),
            scale=drawn((None, numbers.uniform(0.02, 0.4))),
        )
        cache = replace(plain_cache(self.can), page_size=numbers.choice((1, 16, 32, 64)))
        if not self.serves(spec, may_refuse=True, page_size=cache.page_size):
            cache = plain_cache(self.can)
        if not self.serves(spec, may_refuse=True):
            spec = self.make_mla()
        rows = numbers.choice((1, 2, 4, 7))
        queries = sorted(numbers.choice((1, 1, 2, 3, 8, 9, 17, 40)) for _ in range(rows))
        contexts = [numbers.choice((0, 1, 15, 16, 64, 65, 130, 300)) for _ in range(rows)]
        shape = BatchShape(seq_lens=tuple(map(sum, zip(contexts, queries, strict=True))), query_lens=tuple(queries))
        prefix = numbers.randint(0, min(contexts) // cache.page_size) * cache.page_size
        batch = self.make_batch(
            spec, shape, seed=nth, page_size=cache.page_size, shared_prefix_len=prefix, poison=float("nan"),
            k_scale=numbers.choice((1.0, numbers.uniform(0.2, 4.0))),
        )  # fmt: skip
        padded, want_lse = numbers.choice((0, 3)), self.can.lse and numbers.random() < 0.5
        result = run_backend(self.backend, batch, common_prefix_len=prefix, num_padded_reqs=padded, want_lse=want_lse)
        what = f"{spec} over {cache}: {shape}, k_scale {batch.k_scale}, prefix {prefix}, {padded} padded rows"
        assert_step(result, batch, what)

    @pytest.mark.parametrize("query_len", [2, 3, 4, 8, 9])
    def test_verify_lengths(self, query_len: int) -> None:
        """Several new tokens a row, each of which sees those before it, over short and long contexts."""
        rows = (query_len, query_len + 1, 16 + query_len, 64, 130)
        shape = BatchShape(seq_lens=rows, query_lens=(query_len,) * len(rows))
        self.check(self.make_spec(), [shape])
        self.check_visible(self.make_spec(), shape)  # type: ignore[attr-defined]

    def test_rows_have_a_scale_in_any_cache(self) -> None:
        """A latent row has one scale, of keys and of values at once, whether or not the cache is in fp8."""
        self.check(self.make_spec(), ["small_decode", CONTEXTS], "scale of rows", k_scale=0.25)

    def workspace_options(self, tokens: int) -> Any:
        """Options by which context is expanded so many tokens at a time. A pair of backends overrides it."""
        return validate_options(self.backend_name, {"context_workspace_tokens": tokens})

    @pytest.mark.parametrize("tokens", [1, 7, 16, 64])
    def test_context_in_chunks(self, tokens: int, dtype: torch.dtype) -> None:
        """A context workspace of so many tokens, whatever the contexts: outputs, LSE and cache stay the same."""
        options = self.workspace_options(tokens)
        for shape in (CONTEXTS, LONG) if tokens > 1 else (CONTEXTS,):
            batch = self.make_batch(self.make_spec(dtype=dtype), shape, poison=float("nan"))
            self.check_batch(batch, f"context in chunks of {tokens}", num_padded_reqs=2, options=options)

    def test_chunks_do_not_grow_with_the_context(self) -> None:
        options = self.workspace_options(32)
        sizes = []
        for context in (64, 640):
            batch = self.make_batch(self.make_spec(), BatchShape(seq_lens=(context + 10,), query_lens=(10,)))
            layer = make_layer(self.backend, batch, options=options)
            sizes.append(layer.begin(batch).workspace.shape[0])  # type: ignore[attr-defined]
            chunks = layer.builder.build(0, batch.common()).prefill.chunks
            assert sum(len(chunk.slots) for chunk in chunks) == context
            assert max(len(chunk.slots) for chunk in chunks) <= sizes[-1]
        assert sizes == [32, 32], f"workspaces of {sizes} tokens"

    def test_reads_rows_that_the_engine_has_written(self) -> None:
        """`key=None`: the new rows are in the cache already."""
        for shape in ("mixed_small", CONTEXTS):
            self.check_cached_keys(shape)

    def test_weights_of_the_wrong_shape_are_refused(self) -> None:
        batch = self.make_batch(self.make_spec(), "small_decode")
        weight = batch.weights["kv_b_proj"]
        impl = self.backend.get_impl_cls()
        for given in (None, weight[1:], weight.to(torch.int8)):
            with pytest.raises(ValueError, match="kv_b_proj"):
                impl(batch.spec, batch.cache, batch.device, kv_b_proj=given)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="one scale"):
            impl(batch.spec, batch.cache, batch.device, kv_b_proj=weight, v_scale=2.0)  # type: ignore[call-arg]
