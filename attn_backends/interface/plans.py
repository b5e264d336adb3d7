"""All of a model's layers on one backend, as every engine needs them: builders, one state, an impl a layer; and batches
of every kind that the state can be given, for libraries that choose kernels as they plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic

import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface.backend import AttentionBackend
from attn_backends.interface.impl import AttentionImpl
from attn_backends.interface.metadata import AttentionMetadataBuilder, MetadataT
from attn_backends.interface.refusals import refuse_raw_options
from attn_backends.interface.state import AttentionState
from attn_backends.interface.steps import AttentionStep
from attn_backends.machine import Progress
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, LayerT, Limits, plan_groups

BatchOf = Callable[[AttentionSpec], CommonAttentionMetadata]


class Plans(Generic[LayerT]):
    """Layers that one backend serves over one pool: plan groups, their builders, one state, and impls that are bound.

    Args:
        backend: the class, as `get_backend` or `select_backend` returns it; it has accepted the layers.
        specs: what each layer asks, by any name for the layer.
        cache, limits, device: as states and builders take them.
        options: the backend's own, validated (`validate_options`); None for its defaults.

    Examples:
        >>> from attn_backends import AttentionSpec, KVCacheSpec, Limits, get_backend
        >>> layers = {"full": AttentionSpec(8, 2, 64), "local": AttentionSpec(8, 2, 64, window_left=127)}
        >>> plans = Plans(get_backend("TORCH"), layers, KVCacheSpec(64), Limits(4, 64, 256), "cpu")
        >>> len(plans.builders), plans.bind("local").spec.window_left
        (2, 127)
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        specs: Mapping[LayerT, AttentionSpec],
        cache: KVCacheSpec,
        limits: Limits,
        device: torch.device | str,
        options: Any = None,
    ) -> None:
        refuse_raw_options(options)
        self.backend, self.cache, self.limits = backend, cache, limits
        self.device, self.options = torch.device(device), options
        self.groups = plan_groups(specs)
        of_group = {group.spec: group.spec for group in self.groups}  # one object, so that a step is sooner compared
        self.specs: dict[LayerT, AttentionSpec] = {layer: of_group[spec] for layer, spec in specs.items()}
        where = (cache, limits, self.device)
        self.state: AttentionState[Any] = backend.get_state_cls()(self.groups, *where, options=options)
        self.builders = tuple(backend.get_builder_cls()(group, *where, options=options) for group in self.groups)
        self.impls: dict[LayerT, AttentionImpl[Any]] = {}

    @property
    def needs_exact_lengths(self) -> bool:
        """Whether some layers are planned with exact lengths on the host at every step. Where it is False, some steps
        may need them all the same, as MLA's whose prompts are partly cached: see `needs_lengths_of`."""
        return any(builder.needs_exact_lengths for builder in self.builders)

    def needs_lengths_of(self, common: CommonAttentionMetadata) -> bool:
        """Whether `plan` refuses this batch if its lengths on the host are upper bounds."""
        return any(builder.needs_lengths_of(common) for builder in self.builders)

    def bind(self, layer: LayerT, **weights: Any) -> AttentionImpl[Any]:
        """The impl of a layer, once its weights are loaded; bound again, it takes the place of the last.

        Args:
            weights: what the backend's impl takes of them: `sinks`, `k_scale` and `v_scale`, and what MLA expands by.

        Raises:
            KeyError: the layer is not one of `specs`.
        """
        if layer not in self.specs:
            raise KeyError(f"no layer is named {layer!r}; these plans are of {_some(self.specs)}: bind one of them")
        impl_cls = self.backend.get_impl_cls()
        self.impls[layer] = impl_cls(self.specs[layer], self.cache, self.device, options=self.options, **weights)
        return self.impls[layer]

    def plan(
        self, common: CommonAttentionMetadata | BatchOf, common_prefix_len: int = 0, *, fast_build: bool = False,
        state: AttentionState[Any] | None = None,
    ) -> dict[LayerT, AttentionStep[Any]]:  # fmt: skip
        """Build and plan a batch for every group: each layer's step. A graph's state fills its buffers here, at capture
        as at replay. Run a step's layers before the next `plan`: backends that hold one plan a group refuse it then.

        Args:
            common: the batch; or a function from a spec to its batch, where layers differ in what they attend to.
            common_prefix_len: as `AttentionMetadataBuilder.build` takes it.
            state: who plans; None: the clone of a graph's batch, or this state (`AttentionState.step_for`).

        Raises:
            Unsupported: the batch is of a graph of mixed batches, and the backend has none.
        """
        begin = self.state.step_for if state is None else state.begin_forward
        steps: dict[LayerT, AttentionStep[Any]] = {}
        for group, builder in zip(self.groups, self.builders, strict=True):
            batch = common(group.spec) if callable(common) else common
            if batch.is_mixed and not self.state.has_mixed_graphs:
                self.state.mixed_graph_clone(batch.num_reqs, batch.num_tokens)  # says why there is none
            steps.update(dict.fromkeys(group.layers, begin(builder.build(common_prefix_len, batch, fast_build))))
        return steps

    def replanned(self, num_rows: int, query_len: int) -> dict[LayerT, AttentionStep[Any]] | None:
        """`plan` for a batch of a captured size that lies in the tensors which graphs share with an engine, without the
        batch: each layer's step. None where `plan` is needed; see `AttentionState.replanned`. Of the batch nothing is
        checked."""
        return self._by_layer(self.state.replanned(num_rows, query_len))

    def replanned_mixed(self, num_rows: int, num_tokens: int) -> dict[LayerT, AttentionStep[Any]] | None:
        """The same of a graph of mixed batches."""
        return self._by_layer(self.state.replanned_mixed(num_rows, num_tokens))

    def _by_layer(self, found: Mapping[int, AttentionStep[Any]] | None) -> dict[LayerT, AttentionStep[Any]] | None:
        if found is None:
            return None
        steps: dict[LayerT, AttentionStep[Any]] = {}
        for group in self.groups:
            steps.update(dict.fromkeys(group.layers, found[group.index]))
        return steps

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata | BatchOf) -> bool:
        """Whether every group's builder takes the batch into a graph, and the state has graphs of its kind."""
        batches = [common(group.spec) if callable(common) else common for group in self.groups]
        if not self.state.has_mixed_graphs and any(batch.is_mixed for batch in batches):
            return False
        pairs = zip(self.builders, batches, strict=True)
        return all(builder.can_run_in_cudagraph(batch) for builder, batch in pairs)

    def forward(
        self,
        layer: LayerT,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | torch.Tensor | None,
        steps: Mapping[LayerT, AttentionStep[Any]],
        output: torch.Tensor | None = None,  # [num_tokens, num_qo_heads, head_dim_vo]
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer of a planned step, by its impl: see `AttentionImpl.forward`.

        Raises:
            KeyError: the layer was not bound, or the steps are of other layers.
        """
        try:
            impl, step = self.impls[layer], steps[layer]
        except KeyError:
            raise KeyError(
                f"layer {layer!r} is not bound or has no step: bound are {_some(self.impls)}, and the steps are of "
                f"{_some(steps)}; call bind({layer!r}, ...) once its weights are loaded, and pass what plan returns"
            ) from None
        return impl.forward(query, key, value, kv_cache, step, output, lse=lse)


def _some(layers: Iterable[object]) -> str:
    """The first names of layers, in words."""
    names = [repr(layer) for layer in layers]
    return ", ".join(names[:5]) + ", …" * (len(names) > 5) or "none"


def replaced_plan(backend_name: str, group_index: int) -> RuntimeError:
    """What a step's `check_plan` raises where its group was planned again, and the backend holds one plan a group."""
    return RuntimeError(
        f"this step is of an earlier plan of its group ({group_index}), and {backend_name} holds one plan a group: its "
        "layers would run over the rows of the later one. Run a step's layers before the next plan of the group, or "
        "give each micro-batch a state of its own"
    )


def plan_all_kinds(
    state: AttentionState[Any],
    builder_cls: type[AttentionMetadataBuilder[MetadataT]],
    query_lens: Iterable[int],
    plan: Callable[[MetadataT], object],
    progress: Progress | None,
) -> None:
    """Build and plan the batches of `batches_to_plan` for each of a state's groups, so that a library chooses its
    kernels, and loads or compiles them. Steps may begin on another stream afterwards."""
    for done, group in enumerate(state.groups):
        builder = builder_cls(group, state.cache, state.limits, state.device, options=state.options)
        for batch in batches_to_plan(group.spec, state.cache, state.limits, state.device, query_lens):
            plan(builder.build(0, batch))
        if progress is not None:
            progress(done + 1, len(state.groups), f"first plans, heads of {group.spec.head_dim}")
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


def batches_to_plan(
    spec: AttentionSpec, cache: KVCacheSpec, limits: Limits, device: torch.device, query_lens: Iterable[int]
) -> Iterator[CommonAttentionMetadata]:
    """A batch of one row of each kind that a layer can be given within the limits: with keys in the cache and without,
    of each of some query lengths. Rows have the pool's first pages."""
    longest = limits.max_model_len
    if spec.attention_type is not AttentionType.ENCODER:
        longest = longest if cache.num_pages is None else min(longest, cache.num_slots)
    for query_len in query_lens:
        if query_len > min(limits.max_num_tokens, longest):
            continue
        pages = range(-(-min(longest, query_len + 1) // cache.page_size))
        rows = [SequenceData(0, query_len, None)]  # a prompt, before there is a cache
        if spec.attention_type is AttentionType.CROSS:
            rows = [SequenceData(0, query_len, pages, seq_len=1, new_kv_len=new) for new in (0, 1)]
        elif spec.attention_type is AttentionType.DECODER:
            contexts = (0, 1) if query_len < longest else (0,)
            rows += [SequenceData(context, query_len, pages) for context in contexts]
        for row in rows:
            yield CommonAttentionMetadata.from_sequence_groups([SequenceGroup("", (row,))], cache.page_size, device)
