"""Time of a layer's MLA decode on a GPU, by our backends and by the bare kernels they use, in one run and in turns.

    python -m benchmarks attention mla_attention [--backend TRITON_MLA ...] [--shapes decode verify skewed | all | tiny]
        [--no-bare]

Every contender is one CUDA graph over several copies of the latent cache, more than the L2 holds, and its output is
first checked against float64. Ours goes builder → state → impl. "decode us" is the attention on latent rows alone, ours
as the impl's part of that name; "layer us" has the two absorbing products around it, for bare kernels torch's, with
nothing copied where a kernel takes the rope part of queries apart, for ours `forward` without new rows. Ratios are
against the kernel that a backend calls, whose turns are next to the backend's (the median of all rounds' ratios), and
against the fastest bare one, of the same column. "of copy" is the bandwidth of the decode (latent rows once a request,
queries, outputs) as a share of what a copy within the device reads and writes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import torch

from attn_backends import get_backend
from attn_backends.backends.mla.impl import LatentTensors
from attn_backends.batch.views import without_new_keys
from attn_backends.interface.capabilities import CudaGraphSupport
from attn_backends.registry import validate_options
from attn_backends.registry.table import backends
from benchmarks.attention.bare_mla import KERNELS, absorbing
from benchmarks.attention.contest import CACHE_DTYPES, calls_us, parse, parts_of, run, speeds
from benchmarks.attention.mla_problem import LAYERS, Forms, MLAShape, make_forms
from benchmarks.attention.paged_problem import Contender, make_contender
from benchmarks.lib.gpu_harness import make_copy, ratio
from benchmarks.lib.processes import Row
from benchmarks.lib.reasons import reason

LAYER = " layer"
MANY, FEW = (128, 1, 576), (16, 1, 576)
SHAPES = {
    "decode": [
        MLAShape((8192,), MANY),
        MLAShape((4096,) * 64, MANY),
        MLAShape((4096,) * 128, MANY),
        MLAShape((8192,) * 128, MANY),
        MLAShape((8192,), FEW),
        MLAShape((4096,) * 32, FEW),
        MLAShape((4096,) * 128, FEW),
    ],
    "verify": [
        MLAShape((4096,) * 64, heads, query_len=query_len) for heads in (MANY, FEW) for query_len in (2, 4)
    ],
    "skewed": [
        MLAShape((4641, 45118, 1730, 1696), FEW, query_len=4),
        MLAShape((4641, 45118, 1730, 1696), MANY, query_len=4),
        MLAShape((4641, 45118, 1730, 1696), FEW),
        MLAShape((45118,) + (1000,) * 31, FEW),
    ],
    "tiny": [MLAShape((64,) * 3, (4, 1, 576)), MLAShape((128, 64), (4, 1, 576), query_len=2)],
}  # fmt: skip
OWN = {  # the kernel that a backend calls
    "FLASHMLA": "FlashMLA, page 64",
    "FLASHINFER_MLA": "FlashInfer MLA fa3",
    "FLASH_ATTN_MLA": "FA3 qv, page 32",
}

Made = dict[str, Contender]


def all_backends() -> list[str]:
    """Every MLA backend that can be imported here."""
    found = []
    for name in backends:
        try:
            if get_backend(name).capabilities().mla:
                found.append(name)
        except ImportError:
            continue
    return found


def ours(name: str, forms: Forms, options: dict[str, Any]) -> Made:
    """A backend's decode and whole layer, over one plan; with the page size that it serves."""
    latent, layer = (form.fitting(get_backend(name)) for form in forms)
    assert layer.kv_b_proj is not None
    layer = replace(layer, common=latent.common)  # of the same pages
    backend, builder, state, _ = parts_of(name, layer, options, kv_b_proj=layer.kv_b_proj)
    # Layers take turns as in a model: what the first of a step does for all is done once for as many.
    given = {"options": validate_options(name, options), "kv_b_proj": layer.kv_b_proj}
    impls = [backend.get_impl_cls()(layer.spec, layer.cache, layer.device, **given) for _ in range(LAYERS)]
    shape = (len(latent.shape.seq_lens), latent.shape.query_len, latent.spec.num_qo_heads, -1)

    def captured(step: Any, held: object) -> Made:
        decodes, wholes = cycle(impls), cycle(impls)

        def decode(i: int) -> torch.Tensor:
            query, out = latent.queries[i].view(shape), latent.outputs[i].view(shape)
            next(decodes)._decode(LatentTensors(query, latent.caches[i].key, out, None), step)
            return latent.outputs[i]

        def whole(i: int) -> torch.Tensor:
            return next(wholes).forward(layer.queries[i], None, None, layer.caches[i], step, layer.outputs[i])

        return {name: make_contender(latent, decode, held), name + LAYER: make_contender(layer, whole, held)}

    common = replace(layer.common, for_graph=True)
    if backend.capabilities().cuda_graph is CudaGraphSupport.NEVER or not builder.can_run_in_cudagraph(common):
        return captured(state.begin_forward(builder.build(0, without_new_keys(layer.common))), state)
    with state.graph_capture(common.num_reqs):
        clone = state.graph_clone(common.num_reqs, latent.shape.query_len)
        made = captured(clone.begin_forward(builder.build_for_cudagraph_capture(common)), (state, clone))
    clone.begin_forward(builder.build(0, common))  # as before every replay
    return made


def bare(name: str, forms: Forms) -> Made:
    kernel = KERNELS[name]
    latent, layer = (form.repaged(kernel.page_size or form.cache.page_size) for form in forms)
    layer = replace(layer, common=latent.common)
    made = {name: make_contender(latent, kernel.make(latent))}  # type: ignore[arg-type]
    spare = replace(latent, queries=[torch.empty_like(query) for query in latent.queries])  # absorbed ones land there
    call = absorbing(layer, spare, kernel)
    return made | {name + LAYER: make_contender(layer, call, spare)}


def all_made(forms: Forms, names: Sequence[str], options: dict[str, Any], with_bare: bool) -> tuple[Made, list[str]]:
    """The contenders for one shape that are right, each captured; and who dropped out why."""
    made: Made = {}
    dropped = []
    for name in [*names, *(KERNELS if with_bare else ())]:
        try:
            found = bare(name, forms) if name in KERNELS else ours(name, forms, options)
            for contender in found.values():
                contender.check()
            made |= found
        except Exception as error:  # whatever a kernel library raises, and wrong answers
            dropped.append(f"{forms.latent.shape.name}: {name}: {reason(error)}")
    return made, dropped


class Prepared(NamedTuple):
    forms: Forms
    made: Made
    dropped: list[str]


@torch.inference_mode()
def prepare(arguments: argparse.Namespace, shape: MLAShape) -> Prepared:
    device, names = torch.device(arguments.device), arguments.backend or all_backends()
    forms = make_forms(shape, CACHE_DTYPES[arguments.dtype], arguments.page_size, device)
    return Prepared(forms, *all_made(forms, names, arguments.options, arguments.bare))


@torch.inference_mode()
def measure(arguments: argparse.Namespace, prepared: Prepared) -> Row:
    """Rows of one shape, and who dropped out."""
    forms, made, dropped = prepared
    shape, device = forms.latent.shape, forms.latent.device
    errors = {name: contender.worst_error() for name, contender in made.items()}
    twins = {name + end: own + end for name, own in OWN.items() for end in ("", LAYER)}
    each, copied = calls_us(made, make_copy(device), arguments.rounds, device, twins)
    us = {name: statistics.median(times) for name, times in each.items()}
    best = {end: min((us[name + end] for name in KERNELS if name + end in us), default=None) for end in ("", LAYER)}
    rows = []
    for name in made:
        if name.endswith(LAYER):
            continue
        row: dict[str, Any] = {"shape": shape.name, "contender": name}
        for end, column in (("", "decode"), (LAYER, "layer")):
            time, lowest, own = us[name + end], best[end], OWN.get(name, name) + end
            ratios = {
                "own bare": ratio(each[name + end], each[own]) if own in each else None,
                "best bare": lowest and time / lowest,
            }
            row |= {f"{column} us": time, **{f"{column} vs {other}": ratio for other, ratio in ratios.items()},
                    f"{column} error": errors[name + end]}  # fmt: skip
        rows.append(row | speeds(forms.latent, us[name], copied))
    return {"rows": rows, "dropped": dropped}


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(__doc__, given, SHAPES, [], 64)
    run("mla_attention", "MLA decode of one layer", arguments, SHAPES, prepare, measure)


if __name__ == "__main__":
    main()
