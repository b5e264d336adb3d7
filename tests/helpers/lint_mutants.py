"""Backends that accept what they do not use, or keep what they should not: for a check of `lint` to find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends.backends.mla.torch_mla.backend import TorchMLABackend
from attn_backends.backends.mla.torch_mla.impl import TorchMLAImpl
from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attn_backends.backends.torch.state import TorchGraphState, TorchState
from attn_backends.interface import CudaGraphSupport
from attn_backends.spec import AttentionSpec, AttentionType
from tests.helpers.mutants import (
    Backend,
    Common,
    declares,
    mutant,
    other_batch,
    other_forward,
    other_scales,
    other_spec,
)
from tests.helpers.mutations import (
    SERVES_ALL,
    BuildsThawed,
    RemembersTheLastBatch,
    ReusesItsMetadata,
    Thawed,
    longer_chunks,
    lse_of_base_2,
    next_slot,
    output_of_its_own,
    padded_rows_left_alone,
    rising_alibi,
    wider,
)
from tests.helpers.toy_backend import ToyBackend, ToyMetadata, ToyMetadataBuilder
from tests.helpers.verify_mutants import caches_as_copies


@dataclass(frozen=True)
class LintMutation:
    name: str
    backend: Backend
    check: str  # of lint's CHECKS
    code: str
    where: str  # and what, as a regular expression

    def __str__(self) -> str:
        return self.name


def without(**changes: Any) -> Backend:
    """Builder and impl believe in a layer that lacks something."""
    return other_spec(lambda spec: replace(spec, **changes))


def only_with_prompts(field: str, value: Any) -> Backend:
    """A feature that is honoured in steps with prompts, and dropped in those that decode alone."""

    class Impl(TorchImpl):
        def __init__(self, spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
            super().__init__(spec, *args, **kwargs)
            self.poorer = TorchImpl(replace(spec, **{field: value}), *args, **kwargs)

        def attend(self, *args: Any) -> None:
            if args[4].metadata.num_prefills:
                super().attend(*args)
            else:
                self.poorer.attend(*args)

    return mutant(impl=Impl)


def lse_left(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    return forward(**{**given, "lse": None})  # type: ignore[no-any-return]


def lse_of_the_keys(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """An LSE without the sinks."""
    output: torch.Tensor = forward(**given)
    if given.get("lse") is not None and layer.sinks is not None:
        lse = given["lse"]
        lse.copy_(lse + torch.log1p(-torch.exp(layer.sinks - lse)))
    return output


def causal_encoder(spec: AttentionSpec) -> AttentionSpec:
    if spec.attention_type is AttentionType.ENCODER:
        return replace(spec, attention_type=AttentionType.DECODER, causal=True)
    return spec


def half_the_output(forward: Any, layer: Any, given: dict[str, Any]) -> torch.Tensor:
    """What is given is filled for the first half of the heads."""
    output: torch.Tensor = forward(**{**given, "output": None})
    if given["output"] is None:
        return output
    half = output.shape[1] // 2
    given["output"][:, :half] = output[:, :half]
    return given["output"]  # type: ignore[no-any-return]


class DropsThePrefix(TorchMetadataBuilder):
    """The number is in the metadata, and nobody acts on it."""

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        return replace(super().build(0, common_attn_metadata, fast_build), common_prefix_len=common_prefix_len)


class LongestEver(ToyMetadataBuilder):
    """A launch bound that never falls."""

    longest = 0

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> ToyMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.longest = max(self.longest, built.num_pages_to_read)
        return replace(built, num_pages_to_read=self.longest)


@dataclass(frozen=True)
class WithLengths(TorchMetadata):
    host_lens: torch.Tensor  # [R] i32


class StagesOnTheHost(TorchMetadataBuilder):
    """Lengths are views of one host buffer, which the next build fills."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staging = torch.zeros(256, dtype=torch.int32)

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        built, lens = (
            super().build(common_prefix_len, common_attn_metadata, fast_build),
            common_attn_metadata.seq_lens_cpu,
        )
        self.staging[: len(lens)] = lens
        return WithLengths(**vars(built), host_lens=self.staging[: len(lens)])


@dataclass(frozen=True)
class WithAList(TorchMetadata):
    lengths: list[int]


class BuildsAList(TorchMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return WithAList(**vars(built), lengths=common_attn_metadata.seq_lens_cpu.tolist())


class StaleDecodes(TorchMetadataBuilder):
    """The number of decodes is that of the batch before, where it may be."""

    last = 0

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        stale, self.last = self.last, built.num_decodes
        return replace(built, num_decodes=min(stale, built.num_decodes) if stale else built.num_decodes)


class PlansOnce(TorchState):
    """A plan for as many tokens is taken for the plan of this step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: dict[object, Any] = {}

    def begin_forward(self, metadata: Any) -> Any:
        return self.plans.setdefault((metadata.num_decodes, metadata.num_prefills), super().begin_forward(metadata))


class FillsOnce(TorchGraphState):
    """Slots to gather are those of the first fill."""

    is_filled = False

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], metadata: TorchMetadata) -> None:
        kept = {name: tensor.clone() for name, tensor in buffers.items()}
        super().prepare_graph_input_buffers(buffers, metadata)
        if self.is_filled:
            buffers["slots"].copy_(kept["slots"])
        self.is_filled = True


class Rebinds(TorchGraphState):
    """What a graph reads are copies, made anew at each step."""

    def get_graph_input_buffers(self, metadata: TorchMetadata) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in super().get_graph_input_buffers(metadata).items()}


def graphs(graph_state: type[TorchGraphState]) -> Backend:
    return mutant(state_cls=type("State", (TorchState,), {"graph_cls": graph_state}))


class PagesOf16(TorchMetadataBuilder):
    """Other pages than those of 16 keys are all taken for the row's first."""

    def build(self, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False) -> TorchMetadata:
        common = common_attn_metadata
        if common.page_size != 16:
            common = replace(common, page_table=common.page_table[:, :1].expand_as(common.page_table).contiguous())
        return super().build(common_prefix_len, common, fast_build)


def unscaled_latents() -> Backend:
    class Impl(TorchMLAImpl):
        def __init__(self, *args: Any, k_scale: float = 1.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    return type("Mutant", (TorchMLABackend,), {"impl_cls": Impl})


ONE_TOKEN = CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
FEATURES = [
    LintMutation("soft cap dropped", without(logits_soft_cap=None), "features", "capability-ignored", "soft_cap"),
    LintMutation("soft cap dropped in decodes", only_with_prompts("logits_soft_cap", None), "features",
                 "capability-ignored", "soft_cap, decodes"),
    LintMutation("window dropped", without(window_left=-1), "features", "capability-ignored", "window"),
    LintMutation("window one too wide", other_spec(wider(1)), "features", "capability-wrong", "one key too wide"),
    LintMutation("window one too narrow", other_spec(wider(-1)), "features", "capability-wrong", "one key too narrow"),
    LintMutation("alibi dropped", without(alibi_slopes=None), "features", "capability-ignored", "alibi"),
    LintMutation("alibi rising", other_spec(rising_alibi), "features", "capability-wrong", "of the wrong sign"),
    LintMutation("sinks ignored", without(sinks=False), "features", "capability-ignored", "sinks"),
    LintMutation("chunks ignored", without(chunk_size=None), "features", "capability-ignored", "chunks"),
    LintMutation("chunks one too long", other_spec(longer_chunks), "features", "capability-wrong", "one key too long"),
    LintMutation("causal always", without(causal=True), "features", "capability-ignored", "non_causal"),
    LintMutation("never causal", without(causal=False), "features", "argument-ignored", "causal"),
    LintMutation("encoder as a decoder", other_spec(causal_encoder), "features", "capability-ignored", "encoder"),
    LintMutation("scale ignored", without(scale=None), "features", "argument-ignored", "scale"),
    LintMutation("lse not written", other_forward(lse_left), "features", "capability-wrong", "LSE is not written"),
    LintMutation("lse of base 2", other_forward(lse_of_base_2), "features", "capability-wrong", "the LSE is off"),
    LintMutation("lse without sinks", other_forward(lse_of_the_keys), "features", "capability-wrong",
                 "sinks.*LSE is off"),
    LintMutation("padding left alone", other_forward(padded_rows_left_alone), "features", "capability-wrong",
                 "padded rows are not zeros"),
    LintMutation("soft cap honoured undeclared", mutant(capabilities=declares(soft_cap=False)), "features",
                 "capability-undeclared", "soft_cap"),
    LintMutation("gap not refused", mutant(capabilities=declares(soft_cap=False), reject=SERVES_ALL), "features",
                 "capability-not-refused", "soft_cap"),
]  # fmt: skip
SCALES = [
    LintMutation("k_scale not read", other_scales(lambda k, v: (1.0, v)), "scales", "argument-ignored",
                 "k_scale is not read"),
    LintMutation("v_scale not read", other_scales(lambda k, v: (k, 1.0)), "scales", "argument-ignored",
                 "v_scale is not read"),
    LintMutation("no scale read", other_scales(lambda k, v: (1.0, 1.0)), "scales", "argument-ignored",
                 "not written as real / scale"),
    LintMutation("v_scale for keys", other_scales(lambda k, v: (v, v)), "scales", "argument-ignored",
                 "v_scale is read for keys"),
    LintMutation("scales exchanged", other_scales(lambda k, v: (v, k)), "scales", "argument-ignored", "exchanged"),
    LintMutation("slots off by one", other_batch(next_slot), "scales", "argument-ignored", "slots"),
    LintMutation("fp8_queries for nothing", mutant(capabilities=declares(fp8_queries=True)), "scales",
                 "capability-ignored", "fp8_queries"),
    LintMutation("pages of 16 always", mutant(PagesOf16), "declared values", "run-failed|capability-wrong", "pages of"),
    LintMutation("caches copied", other_forward(caches_as_copies), "declared values", "run-failed", "layout HND"),
    LintMutation("MLA: k_scale not read", unscaled_latents(), "scales", "argument-ignored", "k_scale is not read"),
    LintMutation("one layout of two", mutant(capabilities=declares(layouts=frozenset({"NHD"}))), "undeclared layouts",
                 "capability-undeclared", "HND"),
]  # fmt: skip
CALLS = [
    LintMutation("lse accepted and left", mutant(impl=other_forward(lse_left).impl_cls,
                 capabilities=declares(lse=False)), "lse", "argument-ignored", "lse"),
    LintMutation("lse undeclared", mutant(capabilities=declares(lse=False)), "lse", "capability-undeclared", "lse"),
    LintMutation("output of its own", other_forward(output_of_its_own), "output", "argument-ignored", "output"),
    LintMutation("half the output", other_forward(half_the_output), "output", "argument-ignored", "not all of it"),
    LintMutation("cascade dropped", mutant(DropsThePrefix), "common_prefix_len", "capability-ignored", "cascade"),
    LintMutation("cascade undeclared", mutant(capabilities=declares(cascade=False)), "common_prefix_len",
                 "capability-undeclared", "cascade"),
]  # fmt: skip
KEPT = [
    LintMutation("longest bound kept", type("Toy", (ToyBackend,), {"builder_cls": LongestEver}), "builders",
                 "metadata-stale", "ToyMetadata.num_pages_to_read"),
    LintMutation("page table kept", mutant(RemembersTheLastBatch), "builders", "metadata-stale", "pages|slots"),
    LintMutation("decodes kept", mutant(StaleDecodes), "builders", "metadata-stale", "TorchMetadata.num_decodes"),
    LintMutation("slots written over", mutant(ReusesItsMetadata), "builders", "metadata-overwritten", "slot_mapping"),
    LintMutation("host staging handed out", mutant(StagesOnTheHost, metadata_cls=WithLengths), "builders",
                 "metadata-overwritten", "WithLengths.host_lens"),
    LintMutation("metadata thawed", mutant(BuildsThawed, metadata_cls=Thawed), "builders", "metadata-mutable",
                 "it can be set"),
    LintMutation("a list in the metadata", mutant(BuildsAList, metadata_cls=WithAList), "builders", "metadata-mutable",
                 "WithAList.lengths.*list"),
    LintMutation("a plan kept", mutant(state_cls=PlansOnce), "states", "state-stale", "behind"),
    LintMutation("a graph filled once", graphs(FillsOnce), "graphs", "graph-stale", "replay"),
    LintMutation("a graph's tensors made anew", graphs(Rebinds), "graphs", "graph-moved", "another address"),
    LintMutation("graphs undeclared", mutant(capabilities=declares(cuda_graph=CudaGraphSupport.NEVER)), "graphs",
                 "capability-undeclared", "cuda_graph"),
    LintMutation("graphs of one token", mutant(capabilities=declares(cuda_graph=ONE_TOKEN)), "graphs",
                 "capability-undeclared", "UNIFORM_BATCH"),
    LintMutation("graphs declared and not there", mutant(state_cls=type("State", (TorchState,), {"graph_cls": None})),
                 "graphs", "capability-refused", "cuda_graph"),
]  # fmt: skip
MUTATIONS = [*FEATURES, *SCALES, *CALLS, *KEPT]
WHOLE = TorchBackend
