"""The simulator catches what breaks under CUDA graphs: nine broken states, each beside the right one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.graphs.harness import CapturedStep, graph_batch
from attn_backends.testing.graphs.host_reads import GraphViolation
from attn_backends.testing.graphs.simulator import GraphSimulator
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import Backend, Layer, assert_matches, assert_pool, make_layers
from tests.helpers import graph_mutants as mutants
from tests.helpers.toy_backend import ToyBackend, ToyMetadata, ToyState, ToyStep

SIZE = 4  # rows of the captured graph
PLAIN = AttentionSpec(4, 2, 16)
WIDE = AttentionSpec(8, 2, 32)
CAPTURED = (5, 9, 3, 7)
LONGEST = (60, 17, 34, 1)
REPLAYED = ((40, 3), LONGEST, (16,), (33, 2, 48), CAPTURED)


def batches(seq_lens: Sequence[int], *specs: AttentionSpec, seed: int = 0) -> list[Batch]:
    """One batch a layer: the same rows in the same pages of a pool that is NaN wherever nothing is cached."""
    ones = [1] * len(seq_lens)
    how: dict[str, Any] = {"num_pages": 64, "seed": seed + sum(seq_lens), "poison": float("nan")}
    return [random_batch(ToyBackend, spec, seq_lens, ones, **how) for spec in specs or (PLAIN,)]


def layers_of(backend: Backend, *specs: AttentionSpec) -> tuple[Layer, ...]:
    return make_layers(backend, batches(CAPTURED, *specs), *batches(LONGEST, *specs))


def captured(backend: Backend, *specs: AttentionSpec, **simulator: bool) -> CapturedStep:
    """A graph of one layer a spec, captured with short rows."""
    layers = layers_of(backend, *specs)
    with layers[0].state.graph_capture(SIZE):
        clone = layers[0].state.graph_clone(SIZE)
    return CapturedStep(layers, clone, batches(CAPTURED, *specs), SIZE, 1, GraphSimulator(**simulator))


def replay(step: CapturedStep, each: Sequence[Batch]) -> None:
    """Fill, replay, compare with the reference."""
    step.fill(each)
    check(step, each)


def check(step: CapturedStep, each: Sequence[Batch]) -> None:
    for result, batch in zip(step.replay(), each, strict=True):
        assert_matches(result, batch, "the replay")
        assert_pool(result.kv_cache, batch.pool_after(), "the replay")


@pytest.mark.parametrize("inference", [True, False])
def test_the_right_state_replays_any_batch(inference: bool) -> None:
    """Batches of other sizes and lengths, growing and shrinking, over two plan groups and one workspace."""
    with torch.inference_mode(inference):
        run = captured(ToyBackend, PLAIN, WIDE)
        assert run.graph.unreachable == ()  # type: ignore[attr-defined]
        for seq_lens in REPLAYED:
            replay(run, batches(seq_lens, PLAIN, WIDE))


def test_graphs_of_several_sizes_share_a_state() -> None:
    layers, simulator = layers_of(ToyBackend), GraphSimulator()
    state = layers[0].state
    with state.graph_capture(SIZE):
        steps = {
            size: CapturedStep(layers, state.graph_clone(size), batches(CAPTURED[:size]), size, 1, simulator)
            for size in (SIZE, 2)
        }
    for seq_lens in REPLAYED:
        replay(steps[2 if len(seq_lens) <= 2 else SIZE], batches(seq_lens))


def test_1_fresh_tensors_read_as_poison_and_are_listed() -> None:
    run = captured(mutants.fresh_tensors(ToyBackend))
    unreachable = run.graph.unreachable  # type: ignore[attr-defined]
    listed = "\n".join(unreachable)
    assert "[4, 4] torch.int32, in toy_backend.py:" in listed, listed
    with pytest.raises(GraphViolation, match="fails at replay") as caught:
        replay(run, batches(LONGEST))
    assert set(unreachable) <= {line.split("freed memory: ")[-1] for line in str(caught.value).split("\n")}


def test_1_fresh_tensors_can_be_refused_at_capture() -> None:
    with pytest.raises(GraphViolation, match="is held by nothing in `persistent`"):
        captured(mutants.fresh_tensors(ToyBackend), refuse_unreachable=True)


def test_1_rebound_buffers_have_moved() -> None:
    run = captured(mutants.rebound_buffers(ToyBackend))
    with pytest.raises(GraphViolation, match=r"persistent\[0\]\.buffers\.seq_lens moved: address"):
        replay(run, batches(LONGEST))


def test_2_a_plan_of_the_warm_up_gives_wrong_numbers() -> None:
    run = captured(mutants.plan_of_the_warm_up(ToyBackend))
    replay(run, batches(CAPTURED))
    with pytest.raises(AssertionError, match="the replay: output is off by"):
        replay(run, batches(LONGEST))


def test_3_smaller_buffers_cannot_be_filled() -> None:
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match the size of tensor b \(4\)"):
        captured(mutants.smaller_buffers(ToyBackend))


def test_4_a_baked_in_length_gives_wrong_numbers() -> None:
    run = captured(mutants.baked_in_length(ToyBackend))
    replay(run, batches((16, 2)))
    with pytest.raises(AssertionError, match="the replay: output is off by"):
        replay(run, batches(LONGEST))


def test_5_a_stale_row_is_not_zero() -> None:
    run = captured(mutants.stale_rows(ToyBackend))
    replay(run, batches(LONGEST))
    with pytest.raises(AssertionError, match="padded rows of the output are not zero"):
        replay(run, batches((40, 3)))


def test_6_live_padding_spoils_a_row() -> None:
    run = captured(mutants.live_padding(ToyBackend))
    replay(run, batches(LONGEST))
    with pytest.raises(AssertionError, match="output is off by inf"):
        replay(run, batches((40, 3)))


def test_7_two_fills_give_two_results_for_one_batch() -> None:
    run = captured(mutants.two_fills(ToyBackend))
    assert fills_differ(ToyBackend) == []
    assert "seq_lens" in fills_differ(mutants.two_fills(ToyBackend))
    with pytest.raises(AssertionError, match="the replay: output is off by"):
        replay(run, batches(CAPTURED))


def fills_differ(backend: Backend) -> list[str]:
    """What a clone holds otherwise after the capture's fill than after the replay's, for one batch."""
    (layer,), held = layers_of(backend), []
    with layer.state.graph_capture(SIZE):
        clone = layer.state.graph_clone(SIZE)
    common = graph_batch(batches(CAPTURED)[0], SIZE, 1)
    for metadata in (layer.builder.build_for_cudagraph_capture(common), layer.builder.build(0, common)):
        clone.begin_forward(metadata)
        held.append(snapshot(clone.get_graph_input_buffers(metadata)))
    return differences(*held)


def test_8_a_workspace_of_the_first_group_does_not_fit_the_second() -> None:
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        captured(mutants.workspace_of_the_first_group(ToyBackend), PLAIN, WIDE)


class Grows(ToyState):
    """Makes the workspace larger when a group does not fit."""

    def step_over(self, metadata: ToyMetadata, plan: torch.Tensor) -> ToyStep:
        try:
            return super().step_over(metadata, plan)
        except RuntimeError:
            self.workspace = torch.empty(4 * len(self.workspace))
            return super().step_over(metadata, plan)


def test_8_a_workspace_that_grows_leaves_the_first_groups_steps_behind() -> None:
    backend = mutants.workspace_of_the_first_group(mutants.broken(ToyBackend, state=Grows))
    with pytest.raises(GraphViolation, match="is written and held by nothing in `persistent`"):
        captured(backend, PLAIN, WIDE)


def test_8_a_workspace_that_grows_after_capture_has_moved() -> None:
    backend = mutants.workspace_of_the_first_group(mutants.broken(ToyBackend, state=Grows))
    layers, wide = layers_of(backend, PLAIN, WIDE), batches(LONGEST, WIDE)
    with layers[0].state.graph_capture(SIZE):
        clone = layers[0].state.graph_clone(SIZE)
    run = CapturedStep(layers[:1], clone, batches(CAPTURED), SIZE, 1, GraphSimulator())
    replay(run, batches(LONGEST))
    clone.begin_forward(layers[1].builder.build(0, graph_batch(wide[0], SIZE, 1)))
    with pytest.raises(GraphViolation, match=r"persistent\[0\]\.state\.workspace moved: shape"):
        run.replay()


def test_9_ubatches_of_their_own() -> None:
    ubatches = [captured(ToyBackend), captured(ToyBackend)]
    for lengths in zip(REPLAYED, REPLAYED[::-1], strict=True):
        replay_ubatches(ubatches, [batches(seq_lens, seed=i) for i, seq_lens in enumerate(lengths)])


def test_9_a_ubatch_on_the_others_lengths_gives_wrong_numbers() -> None:
    backend = mutants.shared_clones(ToyBackend)
    ubatches = [captured(backend), captured(backend)]
    replay_ubatches(ubatches, [batches(LONGEST), batches(LONGEST)])
    with pytest.raises(AssertionError, match="the replay: output is off by"):
        replay_ubatches(ubatches, [batches(LONGEST), batches(CAPTURED)])


def replay_ubatches(ubatches: Sequence[CapturedStep], parts: Sequence[Sequence[Batch]]) -> None:
    """Fill all, then replay all: both are on their way at once."""
    for step, each in zip(ubatches, parts, strict=True):
        step.fill(each)
    for step, each in zip(ubatches, parts, strict=True):
        check(step, each)


SEAMS: dict[str, Callable[[Backend], Backend]] = {
    "begin": lambda backend: mutants.other_begin(backend, lambda begin, clone, size, metadata: begin(metadata)),
    "batch": lambda backend: mutants.other_graph_batch(backend, lambda common: common, at_capture=True),
    "state": lambda backend: mutants.broken(backend),
}


@pytest.mark.parametrize("seam", SEAMS)
def test_the_unchanged_seams_pass(seam: str) -> None:
    """A mutant that changes nothing replays right, so a failure above is the mutation's."""
    run = captured(SEAMS[seam](ToyBackend))
    for seq_lens in REPLAYED:
        replay(run, batches(seq_lens))
