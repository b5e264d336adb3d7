"""What a layer may ask for: run, and judged by outputs with it and without; and what is honoured undeclared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

from attn_backends.spec import AttentionSpec, AttentionType, alibi_slopes
from attn_backends.testing.cases.features import undeclared
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.judge import Drawn, Supposition, as_layer
from attn_backends.testing.lint.subject import BatchKind, Subject

_DRAWS = 6  # of a batch that shows the feature


@dataclass(frozen=True)
class Probe:
    """A feature of a layer: the capability that declares it, its arguments by chance, and a layer without it."""

    name: str  # of the capability; of the argument where none declares it
    changes: Callable[[Random, AttentionSpec], dict[str, Any]]
    absent: dict[str, Any]
    near: Callable[[AttentionSpec], dict[str, dict[str, Any]]] = lambda spec: {}  # faults that are often made, in words
    attention_type: AttentionType = AttentionType.DECODER
    is_of_all: bool = False  # every backend honours it

    def is_declared(self, subject: Subject) -> bool:
        if self.attention_type is not AttentionType.DECODER:
            return self.attention_type in subject.can.attention_types
        included = self.name == "standard_alibi" and subject.can.alibi
        return self.is_of_all or included or bool(getattr(subject.can, self.name))


def _near_window(spec: AttentionSpec) -> dict[str, dict[str, Any]]:
    narrower = {"one key too narrow": {"window_left": spec.window_left - 1}} if spec.window_left > 0 else {}
    return {"one key too wide": {"window_left": spec.window_left + 1}, **narrower}


def _rope(numbers: Random, spec: AttentionSpec) -> dict[str, Any]:
    given = {"rope_scale": numbers.uniform(0.5, 2.0), "rope_theta": numbers.uniform(10.0, 1e3)}
    return {"pos_encoding_mode": "ROPE_LLAMA", **given}


def _of_type(kind: AttentionType) -> Callable[[Random, AttentionSpec], dict[str, Any]]:
    return lambda numbers, spec: {"attention_type": kind, "causal": False}


_CAUSAL = {"attention_type": AttentionType.DECODER, "causal": True}
PROBES = (
    Probe("scale", lambda numbers, spec: {"scale": numbers.uniform(1.6, 2.4) * spec.scale}, {"scale": None},
          is_of_all=True),
    Probe("causal", lambda numbers, spec: {}, {"causal": False}, is_of_all=True),
    Probe("window", lambda numbers, spec: {"window_left": numbers.choice((0, numbers.randint(1, 6),
          numbers.randint(7, 15), 16))}, {"window_left": -1}, _near_window),
    Probe("soft_cap", lambda numbers, spec: {"logits_soft_cap": numbers.uniform(0.4, 1.2)}, {"logits_soft_cap": None}),
    Probe("alibi", lambda numbers, spec: {"alibi_slopes": tuple(numbers.uniform(0.1, 0.8)
          for _ in range(spec.num_qo_heads))}, {"alibi_slopes": None},
          lambda spec: {"of the wrong sign": {"alibi_slopes": tuple(-s for s in spec.alibi_slopes or ())}}),
    Probe("standard_alibi", lambda numbers, spec: {"alibi_slopes": alibi_slopes(spec.num_qo_heads)},
          {"alibi_slopes": None}),
    Probe("rope", _rope, {"pos_encoding_mode": "NONE", "rope_scale": 1.0, "rope_theta": 1e4},
          lambda spec: {"of another theta": {"rope_theta": 2 * spec.rope_theta}}),
    Probe("sinks", lambda numbers, spec: {"sinks": True}, {"sinks": False}),
    Probe("chunks", lambda numbers, spec: {"chunk_size": numbers.randint(4, 14)}, {"chunk_size": None},
          lambda spec: {"one key too long": {"chunk_size": (spec.chunk_size or 0) + 1}}),
    Probe("non_causal", lambda numbers, spec: {"causal": False}, {"causal": True}),
    Probe("unequal_head_dims", lambda numbers, spec: {"head_dim_vo": spec.head_dim + 16}, {}),
    Probe("any_scale", lambda numbers, spec: {"scale": numbers.uniform(-2.0, -0.6) * spec.scale}, {"scale": None},
          lambda spec: {"of the other sign": {"scale": -spec.scale}}),
    Probe("encoder", _of_type(AttentionType.ENCODER), _CAUSAL, attention_type=AttentionType.ENCODER),
    Probe("cross", _of_type(AttentionType.CROSS), {}, attention_type=AttentionType.CROSS),
)  # fmt: skip


def check_features(subject: Subject) -> Iterator[Finding]:
    """Every feature in every kind of batch, with and without the LSE: kernels take other roads for these."""
    for probe in PROBES:
        if subject.can.mla and probe.name == "unequal_head_dims":
            continue  # MLA has no layers without
        if probe.is_declared(subject):
            yield from _declared(subject, probe)
        else:
            yield from _undeclared(subject, probe)


def _declared(subject: Subject, probe: Probe) -> Iterator[Finding]:
    spec = layer_of(subject, probe, subject.numbers(probe.name))
    if refused := subject.rejected(spec):
        yield Finding("capability-refused", probe.name, f"a plain layer with it is refused: {refused[0]}",
                      "Take it out of capabilities(), or serve it.")  # fmt: skip
        return
    modes = (False, True) if subject.can.lse and not subject.is_slow else (subject.can.lse,)
    for kind in _kinds(subject, probe):
        drawn = draw(subject, probe, kind)
        if drawn is not None:  # else such a batch cannot show it: one token a row is causal anyhow
            found = (_compared(subject, probe, kind, drawn, want_lse) for want_lse in modes)
            yield from islice(filter(None, found), 1)


def _compared(subject: Subject, probe: Probe, kind: BatchKind, drawn: Drawn, want_lse: bool) -> Finding | None:
    where = f"{probe.name}, {kind.name}{' with the LSE' if want_lse else ''}"
    try:
        result = subject.run(drawn.batch, want_lse, kind.num_padded_reqs)
    except Exception as error:  # whatever a kernel library raises is the finding
        return Finding("run-failed", where, f"{type(error).__name__}: {error}", "Serve it, or do not declare it.")
    found = drawn.wrong(result)
    if isinstance(found, Supposition) and found.is_absence:
        code = "argument-ignored" if probe.is_of_all else "capability-ignored"
        return Finding(code, where, found.words, f"Honour {', '.join(probe.absent)}, or do not declare it.")
    if found is not None:
        what = found.words if isinstance(found, Supposition) else found
        return Finding("capability-wrong", where, what, "Compare with attn_backends.testing.reference.")
    return None


def draw(subject: Subject, probe: Probe, kind: BatchKind) -> Drawn | None:
    """A batch of a layer with the feature, and what outputs would be without it, or with a near miss. None if no draw
    tells these apart."""
    numbers = subject.numbers(probe.name, kind.name)
    for _ in range(_DRAWS):
        spec = layer_of(subject, probe, numbers)
        batch = subject.batch(spec, kind, numbers)
        if batch.sinks is not None:
            batch = replace(batch, sinks=batch.sinks + 2)  # more weight than a key
        suppositions = [
            Supposition(f"the window, slopes, rotation or chunk is {words}", as_layer(batch, **changes))
            for words, changes in probe.near(spec).items()
        ]
        if probe.absent and probe.attention_type is not AttentionType.CROSS:
            layer = as_layer(batch, **probe.absent)
            words = f"outputs are those of a layer with {_words(probe.absent)}"
            suppositions.insert(0, Supposition(words, layer, is_absence=True))
        if (drawn := Drawn(batch, suppositions)).is_decisive:
            return drawn
    return None


def layer_of(subject: Subject, probe: Probe, numbers: Random) -> AttentionSpec:
    """The plain layer with the feature."""
    changes = probe.changes(numbers, subject.spec())
    if probe.name == "unequal_head_dims" and subject.can.head_dims:
        first, *others = sorted(subject.can.head_dims)
        changes = {"head_dim": first, "head_dim_vo": numbers.choice(others or [first])}
    return subject.spec(**changes)


def _kinds(subject: Subject, probe: Probe) -> list[BatchKind]:
    """Kinds of batches that such a layer has, and that can show what it asks for."""
    if probe.name == "causal":
        return [kind for kind in subject.kinds if "decode" not in kind.name or kind.name.endswith("prompts")]
    if probe.attention_type is AttentionType.DECODER:
        return list(subject.kinds)
    names = {AttentionType.ENCODER: ("a profile run",), AttentionType.CROSS: ("decodes", "tokens to verify")}
    return [kind for kind in subject.kinds if kind.name in names[probe.attention_type]]


def _undeclared(subject: Subject, probe: Probe) -> Iterator[Finding]:
    """A layer that nobody may ask for is refused; what is honoured all the same, in every kind of batch, is told."""
    spec, cache = layer_of(subject, probe, subject.numbers(probe.name)), subject.cache
    codes = {rejection.code for rejection in subject.rejected(spec)}
    if silent := undeclared(subject.backend, spec, cache, subject.device) - codes:
        yield Finding("capability-not-refused", probe.name, f"reject() does not name {', '.join(sorted(silent))}",
                      "Extend the base's reject(), do not replace it.")  # fmt: skip
    cheap = subject.device == "cpu" and not subject.is_slow and not subject.can.mla  # whose layers are decoders alone
    if cheap and all(_honours(subject, probe, k) for k in subject.kinds):
        yield Finding("capability-undeclared", probe.name, "outputs are right in every kind of batch, and layers that "
                      "ask for it are refused", "Declare it in capabilities().")  # fmt: skip


def _honours(subject: Subject, probe: Probe, kind: BatchKind) -> bool:
    """Whether a layer that is refused would be served right; what cannot show the feature says nothing."""
    if kind not in _kinds(subject, probe):
        return True
    drawn = draw(subject, probe, kind)
    return drawn is None or subject.honours(drawn, kind.num_padded_reqs)


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())
