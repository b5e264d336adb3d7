"""A case: layers over one state, and the steps that run over it. It follows from the backend, the device and a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import add
from random import Random

from attn_backends.interface.capabilities import CudaGraphSupport
from attn_backends.spec import AttentionType, MLASpec
from attn_backends.testing.harness import Backend
from attn_backends.testing.verify.layers import Form, draw_form, fits_all
from attn_backends.testing.verify.sizes import Size

MULTIPROCESSORS = {2: 12, 6: 4, 46: 1, 108: 1, 132: 1, 192: 1}  # that an interpreter stands for, and how often
_KINDS = ("decode", "decode", "verify", "chunk", "mixed", "mixed", "skewed", "prefix", "prompts", "profile")
_GRAPH_KINDS = ("decode", "decode", "verify", "skewed", "prefix")
_MIXED_GRAPH_KINDS = tuple(kind for kind in _KINDS if kind != "profile")
GRAPH_TOKENS = 8  # most query tokens of a row that every backend with graphs of several tokens serves


@dataclass(frozen=True)
class Episode:
    """Requests over a pool of their own, for one step or several that follow each other."""

    kind: str
    contexts: tuple[int, ...]  # keys in the cache before the first step; for cross attention all keys
    steps: tuple[tuple[int, ...], ...]  # query tokens of each request, step by step
    shared_len: int  # leading keys that all requests have in the same pages
    hint: bool  # the batch says so
    cached: bool  # False: a profile run
    new_kv_lens: tuple[int, ...] | None  # for cross attention
    num_padded_reqs: int
    gain: float  # of the queries: more makes a few keys heavy, and what latent rows are rounded to shows

    def done(self, num_steps: int) -> list[int]:
        """Query tokens of each request in so many steps together."""
        return [sum(lens[row] for lens in self.steps[:num_steps]) for row in range(len(self.contexts))]

    def seq_lens(self, step: int, is_cross: bool) -> tuple[int, ...]:
        """The length of each request, once the step is done."""
        return self.contexts if is_cross else tuple(map(add, self.contexts, self.done(step + 1)))


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    form: Form
    episodes: tuple[Episode, ...]
    graph_rows: int  # 0: eager
    mixed_tokens: int  # of a graph of mixed batches; 0: of equal rows
    over_table: bool  # graphs read a step table's tensors where they are, or an engine's
    want_lse: bool
    fused: bool  # queries, keys and values are slices of one tensor
    roomy: int  # how many times as much the limits allow as the batches need
    multiprocessors: int

    @property
    def kind(self) -> str:
        graph = " in a mixed graph" if self.mixed_tokens else " in a graph" if self.graph_rows else ""
        return self.episodes[0].kind + graph


def draw_case(backend: Backend, seed: int, size: Size, device: str, multiprocessors: int | None = None) -> Case:
    """The case of a seed."""
    form = draw_form(backend, Random(f"form {seed // size.siblings}"), size, device)
    numbers = Random(f"case {seed}")
    size = size.scaled(2.0 ** -numbers.uniform(0, size.spread))
    level = backend.capabilities().cuda_graph
    in_graph = _is_decoder(form) and level > CudaGraphSupport.NEVER and numbers.random() < 0.4
    graph_tokens = 1
    if in_graph and level >= CudaGraphSupport.UNIFORM_BATCH and numbers.random() < 0.5:
        graph_tokens = numbers.randint(2, GRAPH_TOKENS)
    count = numbers.randint(1, size.num_episodes)
    is_mixed = in_graph and level >= CudaGraphSupport.ALWAYS and numbers.random() < 0.5
    tokens = graph_tokens if in_graph and not is_mixed else 0
    kinds = [numbers.choice(_MIXED_GRAPH_KINDS) if is_mixed else None for _ in range(count)]
    episodes = tuple(draw_episode(form, size, numbers, tokens, kind) for kind in kinds)
    return case_of(backend, seed, form, episodes, in_graph, numbers, multiprocessors, is_mixed)


def case_of(
    backend: Backend, seed: int, form: Form, episodes: tuple[Episode, ...], in_graph: bool, numbers: Random,
    multiprocessors: int | None, is_mixed: bool = False,
) -> Case:  # fmt: skip
    """The case of a form and its episodes, with all else drawn; `is_mixed`: its graph is of mixed batches."""
    rows = max(len(episode.contexts) for episode in episodes) + numbers.choice((0, 0, 1, 3))
    tokens = max(sum(lens) for episode in episodes for lens in episode.steps)
    return Case(
        seed=seed,
        form=form,
        episodes=episodes,
        graph_rows=rows if in_graph else 0,
        mixed_tokens=tokens + numbers.choice((0, 0, 1, 9)) if is_mixed else 0,
        over_table=in_graph and numbers.random() < 0.3,
        want_lse=backend.capabilities().lse and numbers.random() < 0.5,
        fused=not backend.capabilities().mla and numbers.random() < 0.3,
        roomy=numbers.choice((1, 1, 2, 4)),
        multiprocessors=multiprocessors or numbers.choices([*MULTIPROCESSORS], [*MULTIPROCESSORS.values()])[0],
    )


def _is_decoder(form: Form) -> bool:
    return form.specs[0].attention_type is AttentionType.DECODER


def draw_episode(form: Form, size: Size, numbers: Random, graph_tokens: int, kind: str | None = None) -> Episode:
    """One that is within the size: rows are left out, then contexts halved, until it is.

    Args:
        graph_tokens: query tokens of each request in a graph; 0: eager.
        kind: the batch's, drawn if None.
    """
    is_cross = form.specs[0].attention_type is AttentionType.CROSS
    drawn = _draw(form, size, numbers, graph_tokens, kind)
    while not all(fits_all(size, form, lens, drawn.seq_lens(i, is_cross)) for i, lens in enumerate(drawn.steps)):
        smaller = _smaller(drawn, form.page_size, keep_queries=graph_tokens > 0)
        if smaller == drawn:  # one request of one token: nothing is smaller
            return drawn
        drawn = smaller
    return drawn


def _draw(form: Form, size: Size, numbers: Random, graph_tokens: int, kind: str | None) -> Episode:
    kind = kind or numbers.choice(_GRAPH_KINDS if graph_tokens else _KINDS)
    if not _is_decoder(form):
        kind = form.specs[0].attention_type.value
    rows = _log_uniform(numbers, 1, size.max_rows)
    contexts = [_log_uniform(numbers, 1, size.max_context) for _ in range(rows)]
    queries = [graph_tokens or 1] * rows
    shared_len, cached = 0, True
    if not graph_tokens:
        queries = _queries(kind, rows, size, numbers)
    if kind in ("prompts", "profile", "encoder"):
        contexts, cached = [0] * rows, kind == "prompts"
    elif kind == "skewed":
        contexts = [min(context, 64) for context in contexts]
        contexts[numbers.randrange(rows)] = numbers.randint(size.max_context // 2, size.max_context)
    elif kind == "prefix":
        pages = _log_uniform(numbers, 1, max(1, size.max_context // (2 * form.page_size)))
        shared_len = pages * form.page_size
        contexts = [shared_len + numbers.randint(0, 3 * form.page_size) for _ in range(rows)]
    elif kind in ("mixed", "verify", "chunk"):
        contexts = [0 if numbers.random() < 0.15 else context for context in contexts]
    new_kv_lens = None
    if kind == AttentionType.CROSS.value:
        contexts = [numbers.choice((0, context, context)) for context in contexts]
        new_kv_lens = tuple(numbers.choice((0, context)) for context in contexts)
    steps = [tuple(queries)]
    if cached and kind != AttentionType.CROSS.value and numbers.random() < 0.5:
        steps += [(graph_tokens or numbers.choice((1, 1, 2, 5)),) * rows] * numbers.randint(1, size.num_episodes - 1)
    return Episode(
        kind=kind,
        contexts=tuple(contexts),
        steps=tuple(steps),
        shared_len=shared_len,
        hint=numbers.random() < 0.7,
        cached=cached,
        new_kv_lens=new_kv_lens,
        num_padded_reqs=numbers.choice((0, 0, 0, 1, 5)),
        gain=2.0 ** numbers.uniform(-1, 0 if isinstance(form.specs[0], MLASpec) else 1),
    )


def _queries(kind: str, rows: int, size: Size, numbers: Random) -> list[int]:
    """Query tokens of each request, decodes first, however long a backend lets them be."""
    long = [_log_uniform(numbers, 1, size.max_chunk) for _ in range(rows)]
    if kind == "verify":
        return [numbers.randint(2, 16)] * rows
    if kind in ("chunk", "prompts", "profile", "encoder"):
        return sorted(long)
    if kind in ("mixed", "prefix", AttentionType.CROSS.value):
        few = [numbers.choice((1, 1, numbers.randint(2, 16))) for _ in range(rows)]
        return sorted(numbers.choice((few[i], few[i], long[i])) for i in range(rows))
    return [1] * rows


def _smaller(episode: Episode, page_size: int, keep_queries: bool) -> Episode:
    """With fewer requests, or with one and shorter."""
    rows, new = len(episode.contexts), episode.new_kv_lens
    if rows > 1:
        some = slice(0, rows - max(1, rows // 3)) if rows % 2 else slice(max(1, rows // 3), rows)
        steps = tuple(lens[some] for lens in episode.steps)
        return replace(episode, contexts=episode.contexts[some], steps=steps, new_kv_lens=new and new[some])
    context, tokens = episode.contexts[0], episode.steps[0][0]
    if context > tokens or keep_queries:
        context //= 2
    else:
        tokens = max(1, tokens // 2)
    shared_len = min(episode.shared_len, context // page_size * page_size)
    steps = ((tokens,), *episode.steps[1:]) if context or tokens > 1 else episode.steps[:1]
    return replace(episode, contexts=(context,), shared_len=shared_len, steps=steps,
                   new_kv_lens=new and (min(new[0], context),))  # fmt: skip


def _log_uniform(numbers: Random, low: int, high: int) -> int:
    return min(high, int(math.exp(numbers.uniform(math.log(low), math.log(high + 1)))))
