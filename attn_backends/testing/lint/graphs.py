"""CUDA graphs: captured and replayed over batches by chance, on a CPU by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from attn_backends.interface import CudaGraphSupport, Unsupported
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.graphs.harness import CapturedStep, capture, graph_batch
from attn_backends.testing.harness import Layer, Result, make_layer
from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.judge import Drawn
from attn_backends.testing.lint.subject import BatchKind, Subject

_ROWS, _PAGES = 4, 64
_REPLAYS = 5


def check_graphs(subject: Subject) -> Iterator[Finding]:
    """Replays for every query length that the declared level has, for a plain layer and for one with a window."""
    level = subject.can.cuda_graph
    if level is CudaGraphSupport.NEVER:
        if subject.backend.get_state_cls().graph_cls is not None:
            yield Finding("capability-undeclared", "cuda_graph", "the state has a graph_cls, and the level is NEVER",
                          "Declare the level that it serves.")  # fmt: skip
        return
    windows = [subject.spec(window_left=9)] if subject.can.window and not subject.is_slow else []
    is_uniform = level >= CudaGraphSupport.UNIFORM_BATCH
    for query_len in (1, 3) if is_uniform else (1,):
        for spec in (subject.spec(), *windows):
            yield from _replayed(subject, spec, query_len)
    if not is_uniform and subject.device == "cpu" and not any(_replayed(subject, subject.spec(), 3)):
        yield Finding("capability-undeclared", "cuda_graph", "replays of 3 tokens a row are right",
                      f"Declare {CudaGraphSupport.UNIFORM_BATCH.name}.")  # fmt: skip


def _replayed(subject: Subject, spec: AttentionSpec, query_len: int) -> Iterator[Finding]:
    where = f"graph of {query_len} tokens a row{'' if spec.window_left < 0 else ', with a window'}"
    batches = _batches(subject, spec, query_len)
    try:
        layer = make_layer(subject.backend, *batches, num_padded_reqs=_ROWS * query_len, options=subject.options)
        captured = capture([layer], batches[:1], _ROWS, query_len)
    except Unsupported as error:
        yield Finding("capability-refused", f"cuda_graph, {where}", str(error), "Declare NEVER, or give graph_cls.")
        return
    except Exception as error:  # whatever a kernel library raises is the finding
        yield Finding("run-failed", f"capture, {where}", f"{type(error).__name__}: {error}", "Capture it.")
        return
    yield from _moved(captured, layer, batches, query_len, where)
    for nth, batch in enumerate(batches):
        found = Drawn(batch).failure(partial(_replay, captured, batch))
        if found is not None:
            lengths = [[row.data.seq_len for row in each.rows] for each in batches[: nth + 1]]
            yield Finding("graph-stale", where, f"replay {nth} of batches with lengths {lengths}: {found}",
                          "Fill every persistent tensor, and plan, in begin_forward.")  # fmt: skip
            return


def _batches(subject: Subject, spec: AttentionSpec, query_len: int) -> list[Batch]:
    """Large ones and small ones in turns, over pools of one size."""
    numbers = subject.numbers("graphs", query_len, spec.window_left)
    longest = (600 if not subject.is_slow else 60) // _ROWS
    longer = max(1, subject.cache.page_size // 16)
    batches = []
    for nth in range(3 if subject.is_slow else _REPLAYS):
        low, high = ((longest // 2, longest), (query_len + 1, 12))[nth % 2]
        rows = [(longer * numbers.randint(low, high), query_len) for _ in range(numbers.randint(1, _ROWS))]
        kind = BatchKind("replay", lambda _, rows=rows: rows)  # type: ignore[misc]
        batches.append(subject.batch(spec, kind, numbers, num_pages=_PAGES, poison=float("nan")))
    return [replace(batch, sinks=batches[0].sinks) for batch in batches]


def _replay(captured: CapturedStep, batch: Batch) -> Result:
    return captured.run([batch])[0]


def _moved(
    captured: CapturedStep, layer: Layer, batches: Sequence[Batch], query_len: int, where: str
) -> Iterator[Finding]:
    """What a graph reads stays where it is."""
    addresses: dict[str, int] = {}
    for batch in batches[:2]:
        metadata = layer.builder.build(0, graph_batch(batch, _ROWS, query_len))
        captured.clone.begin_forward(metadata)
        read = captured.clone.get_graph_input_buffers(metadata)
        for name, tensor in read.items():
            if addresses.setdefault(name, tensor.data_ptr()) != tensor.data_ptr():
                yield Finding("graph-moved", f"{name}, {where}", "it has another address at the next step",
                              "Copy into the tensor that was captured.")  # fmt: skip
