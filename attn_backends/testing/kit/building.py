"""Builders and metadata: pure, reusable, frozen, and the same by either road."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

from attn_backends.batch.common import SequenceGroup
from attn_backends.batch.placeholders import IndexMap
from attn_backends.interface import AttentionMetadata
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import feature
from attn_backends.testing.graphs.host_reads import forbid_host_reads
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import assert_matches, assert_step, make_layer
from attn_backends.testing.kit.base import WHOLE_PROMPTS, KitBase

POOL_PAGES = 16  # one size for batches that share a builder
DECODES_AND_PROMPTS = BatchShape(seq_lens=(4, 9, 42, 60), query_lens=(1, 1, 40, 21))  # in parts for every backend
STEPS_IN_FLIGHT = (("small_decode", "small_decode"), ("mixed_small", "mixed_small"), ("mixed_small", "small_decode"),
                   (WHOLE_PROMPTS, "page_edges_16"))  # fmt: skip


def assert_same_metadata(one: object, other: object, what: str) -> None:
    found = differences(snapshot(one), snapshot(other))
    assert not found, f"{what}: the metadata differs in {found}"


class Building(KitBase):
    def test_builder_is_pure(self) -> None:
        """Builds of A, B and A again: both As are equal, the first is not touched by B, and all three run right."""
        spec, shapes = self.make_spec(), ("mixed_small", "page_edges_16")
        a, b = (self.make_batch(spec, shape, num_pages=POOL_PAGES, seed=i) for i, shape in enumerate(shapes))
        layer = make_layer(self.backend, a, b)
        first = layer.builder.build(0, a.common())
        before = snapshot(first)
        between = layer.builder.build(0, b.common())
        found = differences(before, snapshot(first))
        assert not found, f"building batch B changed the metadata of batch A: {found}"
        again = layer.builder.build(0, a.common())
        assert_same_metadata(first, again, "batch A before and after batch B")
        for batch, metadata in ((a, first), (b, between), (a, again)):
            step = layer.state.begin_forward(metadata)
            assert_matches(layer.forward(batch, step), batch, "a reused builder")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode"])
    def test_batches_that_it_was_not_made_for_are_refused(self, shape: str) -> None:
        """More rows, tokens or keys than the limits, and pages of another size than the pool's: kernels would read and
        write beyond tensors that a state has sized, or other tokens' slots."""
        batch = self.make_batch(self.make_spec(), shape)
        layer = make_layer(self.backend, batch)
        layer.builder.build(0, batch.common())
        limits = layer.builder.limits
        for name, most in vars(limits).items():
            layer.builder.limits = replace(limits, **{name: most - 1})
            with pytest.raises(ValueError, match=f"{name} {most - 1}"):
                layer.builder.build(0, batch.common())
        layer.builder.limits = limits
        layer.builder.cache = replace(batch.cache, num_pages=1)
        with pytest.raises(ValueError, match="and the pool pages 0 to 0"):
            layer.builder.build_from_groups(batch.groups)
        layer.builder.cache = batch.cache
        other = replace(batch.common(), page_size=2 * batch.cache.page_size)
        with pytest.raises(ValueError, match="made for pages of"):
            layer.builder.build(0, other)

    def test_builder_serves_any_next_batch(self) -> None:
        """Shapes that grow and shrink through one builder and one state."""
        spec = self.make_spec()
        shapes: tuple[BatchShape | str, ...] = (
            "mixed_small",
            "small_decode",
            WHOLE_PROMPTS,
            "page_edges_16",
            "small_prefill",
            "small_decode",
        )
        batches = [self.make_batch(spec, shape, num_pages=POOL_PAGES, seed=i) for i, shape in enumerate(shapes)]
        layer = make_layer(self.backend, *batches)
        for shape, batch in zip(shapes, batches, strict=True):
            assert_matches(layer.forward(batch, layer.begin(batch)), batch, f"{shape} after other batches")

    def test_same_shape_with_other_pages(self) -> None:
        """The next batch of equal lengths, in other pages: nothing of the last one may be remembered."""
        spec = self.make_spec()
        for shape in ("small_decode", "mixed_small"):
            batches = [self.make_batch(spec, shape, num_pages=POOL_PAGES, seed=seed) for seed in (0, 1)]
            layer = make_layer(self.backend, *batches)
            for batch in batches:
                assert_matches(layer.forward(batch, layer.begin(batch)), batch, f"{shape} in other pages")

    @pytest.mark.parametrize("pair", STEPS_IN_FLIGHT, ids=str)
    def test_two_steps_planned_one_after_the_other(self, pair: tuple[BatchShape | str, BatchShape | str]) -> None:
        """Two micro-batches in flight: the first step's layers run behind the second's plan. They are right, or refused
        by what was planned, and nothing is written then. The second is right either way."""
        first, second = (self.make_batch(self.make_spec(), shape, num_pages=POOL_PAGES, seed=seed)
                         for seed, shape in enumerate(pair))  # fmt: skip
        layer = make_layer(self.backend, first, second)
        earlier, later = layer.begin(first), layer.begin(second)
        pool = first.fresh_pool()
        before = snapshot(pool)
        try:
            result = layer.forward(first, earlier, kv_cache=pool)
        except RuntimeError as error:
            if "plan" not in str(error):
                raise AssertionError(f"an earlier step is refused, and not by its plan: {error}") from error
            assert not differences(before, snapshot(pool)), "an earlier step is refused, and its keys written before"
        else:
            assert_step(result, first, "a step that was planned before another")
        assert_step(layer.forward(second, later), second, "the step that was planned last")

    def test_fast_build_gives_the_same_outputs(self) -> None:
        batch = self.make_batch(self.make_spec(), "mixed_small")
        layer = make_layer(self.backend, batch)
        step = layer.state.begin_forward(layer.builder.build(0, batch.common(), fast_build=True))
        assert_matches(layer.forward(batch, step), batch, "fast_build=True")

    @pytest.mark.parametrize("num_padded_reqs", [0, 3])
    @pytest.mark.parametrize("shape", ["mixed_small", "page_edges_16"])
    def test_both_roads_agree(self, shape: str, num_padded_reqs: int) -> None:
        """A scheduler's groups, and common metadata compiled from them. Sequences of one group are rows too."""
        batch = self.make_batch(self.make_spec(), shape)
        layer = make_layer(self.backend, batch, num_padded_reqs=num_padded_reqs)
        compiled = layer.builder.build(0, batch.common(num_padded_reqs))
        direct = layer.builder.build_from_groups(batch.groups, num_padded_reqs)
        assert_same_metadata(compiled, direct, "both roads")
        one = SequenceGroup("one", tuple(row.data for row in batch.rows[:2]))
        joined = layer.builder.build_from_groups([one, *batch.groups[2:]], num_padded_reqs)
        assert_same_metadata(compiled, joined, "two sequences in one group")

    def test_both_roads_agree_without_pages_and_with_a_prefix(self) -> None:
        profile = self.make_batch(self.make_spec(), WHOLE_PROMPTS, cached=False)
        prefix = 2 * self.page_size
        shape = BatchShape(seq_lens=(prefix + 3, prefix + 9, prefix + 20), query_lens=(1, 1, 4))
        shared = self.make_batch(self.make_spec(), shape, shared_prefix_len=prefix)
        for batch, length in ((profile, 0), (shared, prefix)):
            builder = make_layer(self.backend, batch).builder
            direct = builder.build_from_groups(batch.groups, common_prefix_len=length)
            assert_same_metadata(builder.build(length, batch.common()), direct, "both roads")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill"])
    def test_building_reads_nothing_from_the_device(self, shape: str) -> None:
        """What a build needs to know is on the host: a read of the device would wait for all that is queued there."""
        for spec in [spec for _, spec in self.served([feature("plain"), feature("window_15")])]:
            batch = self.make_batch(spec, shape)
            layer, common = make_layer(self.backend, batch), batch.common()
            with forbid_host_reads(self.device, [common, layer.state]):
                layer.state.begin_forward(layer.builder.build(0, common))

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill", WHOLE_PROMPTS], ids=str)
    def test_lengths_that_are_upper_bounds(self, shape: BatchShape | str) -> None:
        """A builder that needs a batch's exact lengths says so; any other takes those of the device."""
        batch = self.make_batch(self.make_spec(), shape)
        layer, common = make_layer(self.backend, batch, num_padded_reqs=4), batch.common()
        more = (common.context_lens_cpu > 0).int()  # a row of new tokens alone is known to be one
        seq_lens, contexts = common.seq_lens_cpu + more, common.context_lens_cpu + more
        bounds = replace(common, seq_lens_are_upper_bounds=True, seq_lens_cpu=seq_lens, context_lens_cpu=contexts,
                         max_seq_len=common.max_seq_len + 1)  # fmt: skip
        needs = layer.builder.needs_lengths_of(bounds)
        assert needs or not layer.builder.needs_exact_lengths
        if needs:
            with pytest.raises(ValueError, match="upper bounds"):
                layer.builder.build(0, bounds)
            bounds = replace(bounds, seq_lens_cpu=common.seq_lens_cpu, context_lens_cpu=common.context_lens_cpu,
                             seq_lens_are_upper_bounds=False, max_seq_len=common.max_seq_len)  # fmt: skip
        assert_matches(layer.forward(batch, layer.state.begin_forward(layer.builder.build(0, bounds))), batch)

    def test_metadata_and_step_are_frozen(self) -> None:
        batch = self.make_batch(self.make_spec(), "mixed_small")
        layer = make_layer(self.backend, batch)
        metadata = layer.builder.build(0, batch.common())
        assert type(metadata) is self.backend.get_metadata_cls(), f"build() gave {type(metadata).__name__}"
        views = (metadata.decode_metadata, metadata.prefill_metadata, layer.state.begin_forward(metadata))
        for frozen in (metadata, *views):
            if frozen is not None:
                for field in fields(frozen):
                    try:
                        setattr(frozen, field.name, None)
                    except FrozenInstanceError:
                        continue
                    raise AssertionError(f"{type(frozen).__name__}.{field.name} can be changed: freeze the dataclass")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", "small_prefill", DECODES_AND_PROMPTS], ids=str)
    @pytest.mark.parametrize("num_padded_reqs", [0, 3])
    def test_views_split_the_batch(self, shape: BatchShape | str, num_padded_reqs: int) -> None:
        """`decode_metadata` and `prefill_metadata`: each part has its counts and runs alone, giving what it gave. A
        batch's padding is in neither, so nothing is written behind a view's own tokens."""
        batch = self.make_batch(self.make_spec(), shape)
        layer = make_layer(self.backend, batch, num_padded_reqs=num_padded_reqs)
        metadata = layer.builder.build(0, batch.common(num_padded_reqs))
        tokens = (metadata.num_decode_tokens, metadata.num_prefill_tokens)
        assert sum(tokens) == len(batch.query), f"decode and prefill tokens are {tokens} of {len(batch.query)}"
        assert metadata.num_decodes + metadata.num_prefills == len(batch.rows), "decodes and prefills are not all rows"
        rows = (batch.rows[: metadata.num_decodes], batch.rows[metadata.num_decodes :])
        for part, view in zip(rows, (metadata.decode_metadata, metadata.prefill_metadata), strict=True):
            assert (view is None) == (not part), f"the view of {len(part)} rows is {view}"
            if view is not None:
                alone, what = replace(batch, rows=part), f"the view {type(view).__name__} of {len(part)} rows"
                assert_step(layer.forward(alone, layer.state.begin_forward(view)), alone, what)

    def test_decodes_are_what_the_builder_says(self) -> None:
        """An engine reads `decode_threshold` off the builder, whose layers may want less than its class has. Rows of
        as many tokens count as decodes, and rows of more do not. A builder that orders rows goes by that."""
        spec = self.make_spec()
        builder = make_layer(self.backend, self.make_batch(spec, "small_decode")).builder
        most, rows = builder.decode_threshold, _Rows()
        assert 1 <= most <= type(builder).decode_threshold, f"the builder's threshold is {most}, above its class's"
        lens = [most, most, most + 1, most + 1]
        query_lens = [most + 1, most, most + 1, most]
        if builder.reorder_batch(rows, query_lens):
            ordered = [query_lens[row] for row in rows.order]
            assert ordered == lens, f"rows of {query_lens} tokens became {ordered}, decodes being of up to {most}"
        shape = BatchShape(seq_lens=tuple(length + 20 for length in lens), query_lens=tuple(lens))
        batch = self.make_batch(spec, shape)
        layer = make_layer(self.backend, batch)
        metadata = layer.builder.build(0, batch.common())
        assert metadata.num_decodes == 2, f"{metadata.num_decodes} decodes of rows of {lens} tokens, up to {most}"
        assert_matches(layer.forward(batch, layer.state.begin_forward(metadata)), batch, f"rows of {lens} tokens")

    @pytest.mark.parametrize("shape", ["mixed_small", "small_decode", WHOLE_PROMPTS], ids=str)
    def test_metadata_goes_to_workers(self, shape: BatchShape | str) -> None:
        """A flat dict, whose tensors are the metadata's own, goes through a pickle, and equals it once rebuilt."""
        batch = self.make_batch(self.make_spec(), shape)
        layer = make_layer(self.backend, batch)
        metadata = layer.builder.build(0, batch.common())
        sent = metadata.asdict_zerocopy()
        mine = {id(value) for value in sent.values() if isinstance(value, torch.Tensor)}
        assert id(sent["slot_mapping"]) == id(metadata.slot_mapping)
        again = type(metadata).from_dict(sent)
        same = again.asdict_zerocopy()
        assert {id(value) for value in same.values() if isinstance(value, torch.Tensor)} == mine, "a tensor was copied"
        got = type(metadata).from_dict(pickle.loads(pickle.dumps(sent)))
        assert_same_metadata(metadata, got, "sent to a worker")
        assert_matches(layer.forward(batch, layer.state.begin_forward(got)), batch, "metadata that was sent")
        left_out = metadata.asdict_zerocopy({"slot_mapping"})
        assert "slot_mapping" not in left_out
        back = type(metadata).from_dict(left_out, slot_mapping=metadata.slot_mapping)
        assert_same_metadata(metadata, back, "a field left out and given")

    def test_placeholders_are_carried(self) -> None:
        """Each part of a batch has its own tokens' maps, and attention makes nothing of them."""
        batch = self.make_batch(self.make_spec(), DECODES_AND_PROMPTS)
        image = IndexMap(np.array([0, 2, 3]), np.array([1, 5, 39]), 4)
        sound = IndexMap(np.array([0]), np.array([0]), 1)
        rows = [replace(row, data=replace(row.data, placeholders=maps))
                for row, maps in zip(batch.rows, ({}, {}, {"image": image}, {"image": image._replace(
                    src=np.array([1]), dest=np.array([20])), "sound": sound}), strict=True)]  # fmt: skip
        given = replace(batch, rows=tuple(rows))
        layer = make_layer(self.backend, given)
        layer.builder.prepare()
        metadata = layer.builder.build(0, given.common(num_padded_reqs=0))
        whole = {"image": ([0, 2, 3, 5], [3, 7, 41, 62], 8), "sound": ([0], [42], 1)}
        assert _lists(metadata) == whole
        first = metadata.num_decode_tokens
        assert metadata.decode_metadata is None or _lists(metadata.decode_metadata) == (
            {} if first <= 2 else {name: of for name, of in whole.items() if max(of[1]) < first}
        )
        shifted = {name: (src, [at - first for at in dest], count) for name, (src, dest, count) in whole.items()}
        assert metadata.prefill_metadata is None or _lists(metadata.prefill_metadata) == shifted
        assert_matches(layer.forward(given, layer.state.begin_forward(metadata)), batch, "a batch with placeholders")


class _Rows:
    """Four rows of a batch that is under way, by their first places."""

    def __init__(self) -> None:
        self.order = [*range(4)]

    def swap_rows(self, first: int, second: int) -> None:
        self.order[first], self.order[second] = self.order[second], self.order[first]


def _lists(metadata: AttentionMetadata) -> dict[str, tuple[list[int], list[int], int]]:
    maps = metadata.multi_modal_placeholder_index_maps
    return {name: (src.tolist(), dest.tolist(), count) for name, (src, dest, count) in maps.items()}
