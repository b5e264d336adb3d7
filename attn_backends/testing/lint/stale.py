"""What a builder, its metadata and a state keep of the batch before: nothing, whatever comes after what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.batch.views import without_new_keys
from attn_backends.interface import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.spec import AttentionSpec, Limits
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.graphs.harness import graph_batch
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import limits_for, make_layer
from attn_backends.testing.lint.calls import prefixed
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.judge import Drawn
from attn_backends.testing.lint.subject import KINDS, Subject

_PAGES = 96  # one pool size for all batches of a builder
_PAIRS = 40  # of batches that are built one after the other
_LONGEST_STATE = 10  # steps through one state


@dataclass(frozen=True)
class Built:
    """A batch as a builder is given it."""

    name: str
    common: CommonAttentionMetadata
    prefix_len: int = 0
    fast_build: bool = False

    def by(self, builder: AttentionMetadataBuilder[Any]) -> Any:
        return builder.build(self.prefix_len, self.common, self.fast_build)


def check_builders(subject: Subject) -> Iterator[Finding]:
    """Random pairs of batches of every kind through one builder, for a plain layer and for one with a window."""
    windows = [subject.spec(window_left=9)] if subject.can.window else []
    for spec in (subject.spec(), *windows):
        found = {(each.code, each.where): each for each in _pairs(subject, spec)}
        yield from found.values()


def _pairs(subject: Subject, spec: AttentionSpec) -> Iterator[Finding]:
    numbers = subject.numbers("pairs", spec.window_left)
    given, batch, limits = batches_of_all_kinds(subject, spec)
    for _ in range(_PAIRS):
        first, second = numbers.sample(given, 2)
        used = subject.builder(batch, limits)
        try:
            before_it = first.by(used)
            kept = snapshot(before_it)
            one, fresh = snapshot(second.by(used)), snapshot(second.by(subject.builder(batch, limits)))
        except Exception as error:  # whatever it raises is the finding
            yield Finding("run-failed", f"build of {second.name}", f"{type(error).__name__}: {error}", "Build it.")
            continue
        kind, after = type(before_it).__name__, f"{second.name} behind {first.name}"
        for path in differences(fresh, one):
            yield Finding("metadata-stale", f"{kind}.{path}", f"it is not what a new builder gives ({after})",
                          "Work it out of the batch alone: a builder keeps no values.")  # fmt: skip
        for path in differences(kept, snapshot(before_it)):
            yield Finding("metadata-overwritten", f"{kind}.{path}", f"the next build changes it ({after})",
                          "Make tensors anew in every build, or hand out a copy.")  # fmt: skip
        yield from changeable(before_it)


def batches_of_all_kinds(subject: Subject, spec: AttentionSpec) -> tuple[list[Built], Batch, Limits]:
    """Batches over one pool: each kind twice, padded for a graph, with a shared prefix, without new keys."""
    numbers, given, drawn = subject.numbers("kinds", spec.window_left), list[Built](), list[Batch]()
    for kind in (*KINDS, *KINDS):
        batch = subject.batch(spec, kind, numbers, num_pages=_PAGES)
        drawn.append(batch)
        common = batch.common(kind.num_padded_reqs)
        given.append(Built(kind.name, common, fast_build=numbers.random() < 0.3))
        if kind.cached:
            given.append(Built(f"{kind.name} whose keys are cached", without_new_keys(batch.common())))
        if kind.name in ("decodes", "tokens to verify") and subject.can.cuda_graph:
            query_len = batch.rows[0].data.query_len
            given.append(Built(f"{kind.name} for a graph", graph_batch(batch, len(batch.rows) + 1, query_len)))
    for kind in (KINDS[0], KINDS[3]):
        batch, prefix_len = prefixed(subject, kind)
        drawn.append(batch)
        given.append(Built(f"{kind.name} with a shared prefix", batch.common(), prefix_len))
    limits = limits_for(*drawn, num_padded_reqs=6)
    return given, drawn[0], Limits(limits.max_num_requests, 2 * limits.max_num_tokens, limits.max_model_len)


def changeable(metadata: Any) -> Iterator[Finding]:
    """Fields that can be set, and containers that can be changed."""
    kind, hint = type(metadata).__name__, "Use a frozen dataclass, and tuples in the place of lists and dicts."
    if not is_dataclass(metadata):
        yield Finding("metadata-mutable", kind, "it is no dataclass", hint)
        return
    theirs = {each.name for each in fields(AttentionMetadata)}  # the interface's, whatever they are
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if field.name not in theirs and isinstance(value, (list, dict, set, bytearray)):
            yield Finding("metadata-mutable", f"{kind}.{field.name}", f"it is a {type(value).__name__}", hint)
        try:
            setattr(metadata, field.name, value)
        except FrozenInstanceError:
            continue
        yield Finding("metadata-mutable", f"{kind}.{field.name}", "it can be set", hint)


def check_host_aliases(subject: Subject) -> Iterator[Finding]:
    """An engine's host tensors are its own: the next step overwrites them while this one's layers still run."""
    numbers = subject.numbers("host")
    for kind in (kind for kind in KINDS if kind.cached):
        batch = subject.batch(subject.spec(), kind, numbers, num_pages=_PAGES)
        whole = batch.common()
        host = {name: getattr(whole, name).clone() for name in ("query_start_loc_cpu", "seq_lens_cpu")}
        common = CommonAttentionMetadata.from_tensors(
            whole.page_size, whole.query_start_loc, host["query_start_loc_cpu"], whole.seq_lens, host["seq_lens_cpu"],
            whole.page_table, whole.slot_mapping,
        )  # fmt: skip
        metadata = subject.builder(batch, limits_for(batch)).build(0, common)
        before = snapshot(metadata)
        for tensor in host.values():
            tensor.fill_(1)
        for path in differences(before, snapshot(metadata)):
            where, what = f"{type(metadata).__name__}.{path}", f"it changes with the engine's tensors ({kind.name})"
            yield Finding("metadata-aliases-host", where, what, "Copy what it keeps.")


def check_states(subject: Subject) -> Iterator[Finding]:
    """Steps of every kind through one state, builder and impl: each as right as alone."""
    numbers, spec = subject.numbers("state"), subject.spec()
    kinds = [numbers.choice(subject.kinds) for _ in range(4 if subject.is_slow else _LONGEST_STATE)]
    batches = [subject.batch(spec, kind, numbers, num_pages=_PAGES) for kind in kinds]
    layer = make_layer(subject.backend, *batches, num_padded_reqs=2, options=subject.options)
    before = "the first step"
    for kind, batch in zip(kinds, batches, strict=True):
        drawn = Drawn(replace(batch, sinks=batches[0].sinks))
        alone = make_layer(subject.backend, drawn.batch, num_padded_reqs=2, options=subject.options)
        step = (drawn.batch, 0, kind.num_padded_reqs)
        found = drawn.failure(partial(layer.run, *step))
        if found is not None and drawn.failure(partial(alone.run, *step)) is None:
            yield Finding("state-stale", f"{kind.name}, behind {before}", found,
                          "Plan every step anew: a state keeps no values of the last one.")  # fmt: skip
        elif found is not None:
            yield Finding("run-failed", kind.name, found, "It is wrong by itself: run the conformance kit.")
        before = kind.name
