"""Nothing silent: what a backend does not declare is refused, with the reason, at selection or in the call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
)
from attn_backends.interface.capabilities import CudaGraphSupport, Unsupported
from attn_backends.registry import explain_for, get_backend, select_backend
from attn_backends.spec import FP8_DTYPES, AttentionSpec, AttentionType, MLASpec
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import CROSS, ENCODER, FEATURES, FLOATS, Feature, plain_cache
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import assert_matches, make_layer
from attn_backends.testing.kit.base import KitBase

OTHER_PAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "more heads": lambda cached: torch.cat([cached, cached], dim=-2),
    "fewer dims": lambda cached: cached[..., :-1],
    "more slots": lambda cached: torch.cat([cached, cached], dim=1),
    "fewer slots": lambda cached: cached[:, :-1],
    "numbers of another dtype": lambda cached: cached.view(torch.int8),
    "numbers as wide": lambda cached: cached.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[cached.itemsize]),
    "no pages apart": lambda cached: cached.flatten(0, 1),
}


def refuses(call: Callable[[], object], code: str, what: str) -> None:
    """`call()` raises `Unsupported` and names `code`."""
    try:
        call()
    except Unsupported as refusal:
        codes = [rejection.code for rejection in refusal.rejections]
        assert code in codes, f"{what}: refused for {codes}, which does not name {code!r}"
        return
    raise AssertionError(f"{what} is not declared, and was accepted in silence: raise Unsupported")


class Refusals(KitBase):
    def test_is_a_static_backend_of_its_name(self) -> None:
        backend = self.backend
        assert issubclass(backend, AttentionBackend)
        assert backend.get_name() == self.backend_name.upper(), f"get_name() is {backend.get_name()}"
        with pytest.raises(TypeError):
            backend()
        assert pickle.loads(pickle.dumps(get_backend(self.backend_name))) is get_backend(self.backend_name)
        for got, base in (
            (backend.get_impl_cls(), AttentionImpl),
            (backend.get_metadata_cls(), AttentionMetadata),
            (backend.get_builder_cls(), AttentionMetadataBuilder),
            (backend.get_state_cls(), AttentionState),
        ):
            assert issubclass(got, base), f"{got.__name__} is not a {base.__name__}"

    def test_serves_a_plain_layer(self) -> None:
        """A backend that refuses everything would pass every other case."""
        assert self.serves(self.make_spec()), "the plain layer of make_spec() must be served"

    @pytest.mark.parametrize("dtype_asked", [*FLOATS, torch.int8], ids=str)
    def test_declared_dtypes(self, dtype_asked: torch.dtype) -> None:
        assert self.serves(self.make_spec(dtype=dtype_asked), may_refuse=True) <= (dtype_asked in self.can.dtypes)

    @pytest.mark.parametrize("cache_dtype", [*FP8_DTYPES, torch.int8], ids=str)
    def test_declared_cache_dtypes(self, cache_dtype: torch.dtype) -> None:
        served = self.serves(self.make_spec(cache_dtype=cache_dtype), may_refuse=True)
        assert served <= (cache_dtype in self.can.cache_dtypes)

    @pytest.mark.parametrize("feature", [*FEATURES, ENCODER, CROSS], ids=lambda feature: feature.name)
    def test_declared_features(self, feature: Feature) -> None:
        """Each feature is served or refused by name: `serves` checks which, and that selection says the same."""
        assert self.can.attention_types <= frozenset(AttentionType)
        list(self.served([feature]))

    @pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
    def test_reasons_are_explained(self, feature: Feature) -> None:
        """`explain_for` has a reason for what is refused alone, before it is known how many pages there are."""
        cache = replace(plain_cache(self.can), num_pages=None)
        spec = self.feature_spec(feature)
        refused = [str(found) for found in self.backend.reject_set_up(spec, cache, self.device, None)]
        assert explain_for(self.backend_name, spec, cache, self.device) == refused

    def test_layers_of_the_other_kind_are_refused(self) -> None:
        """A layer with a latent cache on a backend for plain attention, and the reverse."""
        other = AttentionSpec(4, 4, 64) if self.can.mla else MLASpec(16)
        cache = plain_cache(self.can)
        found = self.backend.reject(other, cache, self.device)
        assert "mla" in {rejection.code for rejection in found}, f"refused for {found}, which does not name 'mla'"
        refuses(lambda: select_backend(self.backend_name, [other], cache, self.device), "mla", "selection")

    def test_other_devices_are_refused(self) -> None:
        codes = {r.code for r in self.backend.reject(self.make_spec(), plain_cache(self.can), "meta")}
        assert "device" in codes, "a device that is not declared is not refused"

    def test_options_by_default_refuse_nothing_more(self) -> None:
        """A backend is asked with its options, and without any where none were given."""
        layer, cache = self.make_spec(), plain_cache(self.can)
        for asked, device in ((layer, self.device), (layer, "meta"), (MLASpec(16), self.device)):
            expected = self.backend.reject(asked, cache, device)
            assert self.backend.reject_set_up(asked, cache, device, None) == expected

    def test_lse(self) -> None:
        """Refused where it is not declared; where it is, every other case asks for it."""
        if not self.can.lse:
            batch = self.make_batch(self.make_spec(), "small_decode")
            layer = make_layer(self.backend, batch)
            step = layer.begin(batch)
            refuses(lambda: layer.forward(batch, step, want_lse=True), "lse", "lse")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode"])
    def test_pages_of_other_layers(self, shape: str) -> None:
        """Pages of more or fewer heads, dims or slots, or of another dtype, are refused before anything is written."""
        batch = self.make_batch(self.make_spec(), shape)
        layer = make_layer(self.backend, batch)
        step, given = layer.begin(batch), (batch.query, batch.key, batch.value)
        for name in ("key",) if self.can.mla else ("key", "value"):
            for what, change in OTHER_PAGES.items():
                pool = batch.fresh_pool()
                assert pool is not None
                pages = pool._replace(**{name: change(getattr(pool, name))})
                before = snapshot(pages)
                with pytest.raises(ValueError, match=f"kv_cache.{name} has pages of"):
                    layer.impl.forward(*given, pages, step)
                assert not differences(before, snapshot(pages)), f"{what} of {name} are refused, and written before"

    def test_pages_that_are_no_cache(self) -> None:
        """Another container, other numbers of pages for keys and values, pages elsewhere; latent rows in wider ones."""
        batch = self.make_batch(self.make_spec(), "mixed_small")
        layer, pool = make_layer(self.backend, batch), batch.fresh_pool()
        assert pool is not None
        step, given = layer.begin(batch), (batch.query, batch.key, batch.value)
        wide = torch.cat([pool.key, pool.key], dim=-1)[..., : pool.key.shape[-1]]
        fewer = pool._replace(key=wide) if self.can.mla else pool._replace(value=pool.value[:-1])
        elsewhere = pool._replace(key=pool.key.to("meta"))
        cases: list[tuple[Any, type[Exception]]] = [
            (tuple(pool), TypeError),
            (fewer, ValueError),
            (elsewhere, ValueError),
        ]
        for wrong, error in cases:
            before = snapshot(pool)
            with pytest.raises(error, match="kv_cache"):
                layer.impl.forward(*given, wrong, step)
            assert not differences(before, snapshot(pool)), "pages are refused, and written before"

    @pytest.mark.parametrize("query_lens", [(1, 1), (1, 30)], ids=str)
    def test_steps_of_other_layers(self, query_lens: tuple[int, ...]) -> None:
        """A layer of another plan group refuses the step, or attends as its own spec says. Rows are longer than what a
        kernel reads at a time."""
        shape = BatchShape(seq_lens=(200, 90), query_lens=query_lens)
        plain = self.make_batch(self.make_spec(), shape)
        for changes in ({"scale": 2 * plain.spec.scale}, {"window_left": 3}):
            spec = self.make_spec(**changes)
            if not self.serves(spec, may_refuse=True):
                continue
            other = self.make_batch(spec, shape)
            for batch, planned in ((other, plain), (plain, other)):
                layer, step = make_layer(self.backend, batch), make_layer(self.backend, planned).begin(planned)
                try:
                    result = layer.forward(batch, step)
                except ValueError:
                    continue
                assert_matches(result, batch, f"a layer whose step is of others, which differ in {changes}")

    def test_graph_verbs(self) -> None:
        """Without graphs every verb refuses."""
        if self.can.cuda_graph is CudaGraphSupport.NEVER:
            batch = self.make_batch(self.make_spec(), "small_decode")
            layer = make_layer(self.backend, batch)
            metadata = layer.builder.build(0, batch.common())
            state = layer.state
            for name, call in {
                "graph_capture": lambda: state.graph_capture(2).__enter__(),
                "graph_capture_get_metadata_for_batch": lambda: state.graph_capture_get_metadata_for_batch(2),
                "graph_clone": lambda: state.graph_clone(2),
                "get_graph_input_buffers": lambda: state.get_graph_input_buffers(metadata),
                "prepare_graph_input_buffers": lambda: state.prepare_graph_input_buffers({}, metadata),
            }.items():
                refuses(call, "cuda_graph", name)

    def test_sinks_are_given_exactly_where_they_are_used(self) -> None:
        """Sinks that a layer's spec does not mention would be dropped; a missing tensor would be zeros."""
        spec, sinks = (
            self.make_spec(),
            torch.zeros(self.make_spec().num_qo_heads, dtype=torch.float32, device=self.device),
        )
        with pytest.raises(ValueError, match="sinks"):
            self.backend.get_impl_cls()(spec, plain_cache(self.can), self.device, sinks=sinks)
        with pytest.raises(ValueError, match="sinks"):
            self.backend.get_impl_cls()(self.make_spec(sinks=True), plain_cache(self.can), self.device)
