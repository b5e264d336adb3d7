"""Arguments of a call and of a builder: `lse`, `output`, `common_prefix_len`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.interface import Unsupported
from attn_backends.spec import Limits
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import Result, make_layer
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.judge import Drawn
from attn_backends.testing.lint.subject import KINDS, BatchKind, Subject

_MIXED = KINDS[3]
_MANY_ROWS, _MANY_KEYS = 128, 32768


def check_lse(subject: Subject) -> Iterator[Finding]:
    """An LSE that is not declared is refused by `attend`; those that are declared are compared with every feature."""
    if subject.can.lse:
        return
    for kind in subject.kinds:
        drawn = Drawn(subject.batch(subject.spec(), kind, subject.numbers("lse", kind.name)))
        try:
            found = drawn.wrong(subject.run(drawn.batch, True, kind.num_padded_reqs))
        except Unsupported:
            continue
        except Exception as error:  # whatever it raises, it is not what a caller waits for
            what = f"{type(error).__name__}: {error}"
        else:
            what = f"it is not declared, and accepted: {found}"
            if found is None:
                yield Finding("capability-undeclared", f"lse, {kind.name}", "the LSE is right",
                              "Declare lse, or raise Unsupported.")  # fmt: skip
                continue
        yield Finding("argument-ignored", f"lse, {kind.name}", what, "Raise Unsupported where an LSE is asked for.")


def check_output(subject: Subject) -> Iterator[Finding]:
    """`output` is written and returned itself; what is not given is allocated."""
    for kind in (each for each in subject.kinds if each.cached and not each.num_padded_reqs):
        drawn = Drawn(subject.batch(subject.spec(), kind, subject.numbers("output", kind.name)))
        batch = drawn.batch
        output = batch.query.new_full((len(batch.query), batch.spec.num_qo_heads, batch.spec.head_dim_vo), torch.nan)
        try:
            layer = make_layer(subject.backend, batch, options=subject.options)
            given = (batch.query, batch.key, batch.value, batch.fresh_pool())
            returned = layer.impl.forward(*given, layer.begin(batch), output)
        except Exception as error:  # whatever a kernel library raises is the finding
            yield Finding("run-failed", f"output, {kind.name}", f"{type(error).__name__}: {error}", "Serve it.")
            continue
        if returned is not output or drawn.wrong(Result(output, None, None)) is not None:
            what = "another tensor is returned" if returned is not output else "it is not written, or not all of it"
            yield Finding("argument-ignored", f"output, {kind.name}", what, "Write in place, into `output`.")


def check_prefix(subject: Subject) -> Iterator[Finding]:
    """`common_prefix_len` changes no output; with `cascade`, and only then, it changes where keys are read."""
    kinds = [kind for kind in subject.kinds if kind.name in ("decodes", "tokens to verify", _MIXED.name)]
    uses = [_uses_prefix(subject, kind) for kind in kinds]
    for used in uses:
        if isinstance(used, Finding):
            yield used
    told = [used for used in uses if isinstance(used, bool)]
    if told and not any(told):
        # So many rows, and so long a prefix, that sharing it pays: metadata alone, which reads no keys.
        batch, size = subject.batch(subject.spec(), KINDS[0], subject.numbers("many")), subject.cache.page_size
        shared, last = range(1, _MANY_KEYS // size + 1), _MANY_KEYS // size + 1
        rows = [SequenceData(_MANY_KEYS + 1, 1, [*shared, last + i]) for i in range(_MANY_ROWS)]
        groups = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
        common = CommonAttentionMetadata.from_sequence_groups(groups, size, batch.device)
        told.append(_plans_otherwise(subject, batch, common, _MANY_KEYS // size * size))
    if subject.can.cascade and told and not any(told):
        yield Finding("capability-ignored", "cascade", "with common_prefix_len and without, metadata and the pages "
                      "that are read are the same", "Attend a shared prefix once, or do not declare it.")  # fmt: skip
    if not subject.can.cascade and any(told):
        yield Finding("capability-undeclared", "cascade", "a shared prefix is attended once", "Declare cascade.")


def _uses_prefix(subject: Subject, kind: BatchKind) -> Finding | bool:
    """Whether it matters that a prefix is told, or what went wrong with it."""
    batch, prefix_len = prefixed(subject, kind)
    drawn, where = Drawn(batch), f"common_prefix_len, {kind.name}"
    try:
        found = drawn.wrong(subject.run(batch, prefix_len=prefix_len))
        if found is not None:
            return Finding("capability-wrong", where, str(found), "The prefix is a hint: outputs are the same.")
        return _plans_otherwise(subject, batch, batch.common(), prefix_len) or _reads_it_once(
            subject, batch, prefix_len
        )
    except Exception as error:  # whatever a kernel library raises is the finding
        return Finding("run-failed", where, f"{type(error).__name__}: {error}", "The prefix is a hint: accept it.")


def prefixed(subject: Subject, kind: BatchKind) -> tuple[Batch, int]:
    """A batch whose rows share some pages, and how many keys lie there."""
    numbers, size = subject.numbers("prefix", kind.name), subject.cache.page_size
    prefix_len = size * numbers.randint(2, 4)
    longer = replace(kind, rows=lambda numbers: [(context + prefix_len, q) for context, q in kind.rows(numbers)])
    return subject.batch(subject.spec(), longer, numbers, shared_prefix_len=prefix_len), prefix_len


def _plans_otherwise(subject: Subject, batch: Batch, common: CommonAttentionMetadata, prefix_len: int) -> bool:
    """Whether the metadata differs with the prefix, but for the number itself."""
    limits = Limits(common.num_reqs, common.num_tokens, common.max_seq_len)
    builder = subject.builder(batch, limits)
    without, with_it = (snapshot(builder.build(length, common)) for length in (0, prefix_len))
    return any(path != "common_prefix_len" for path in differences(without, with_it))


def _reads_it_once(subject: Subject, batch: Batch, prefix_len: int) -> bool:
    """Whether outputs stay as they are where all rows but the first have other pages in the prefix's place."""
    layer, pages = make_layer(subject.backend, batch, options=subject.options), prefix_len // batch.cache.page_size
    common: Any = batch.common()
    table = common.page_table.clone()
    table[1:, :pages] = 0  # a page that no row owns
    step = layer.state.begin_forward(layer.builder.build(prefix_len, replace(common, page_table=table, csr=None)))
    return Drawn(batch).wrong(layer.forward(batch, step)) is None
