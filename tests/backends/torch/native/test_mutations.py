"""The kit finds what is wrong in C too: it fails on every mutation of the kernels' sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.native import paged_decode, paged_prefill
from attn_backends.testing.conformance import BackendConformance
from tests.helpers.emulated_tiles import REFUSED, emulating, needs_products
from tests.helpers.quick_native import forget, quick_native

F32, BF16 = torch.float32, torch.bfloat16
DECODE, PREFILL, BOTH = "paged_decode.c", "paged_prefill.c", "paged.h"
OF_PAIRS = "prompts' pairs without their scale"  # which products by AVX-512 alone have
MUTATIONS: dict[str, tuple[str, str, str, Callable[[Any], object]]] = {  # where, what is there, what takes its place
    "window off by one": (BOTH, "position - s->window_left", "position - s->window_left + 1",
                          lambda k: k.test_window_edges(16)),
    "chunk edge off by one": (BOTH, "first = position / s", "first = (position + 1) / s",
                              lambda k: k.test_chunk_edges(16)),
    "one key short": (BOTH, "position + 1 :", "position :", lambda k: k.test_page_sizes_and_layouts(16, "NHD")),
    "tail of a page read": (BOTH, "position + 1 :", "position + 2 :", lambda k: k.test_nan_never_leaks("plain", None)),
    "all that is cached seen": (BOTH, "s->causal ? position + 1 : s", "s", lambda k: k.test_window_edges(16)),
    "never what is ahead": (BOTH, "s->causal ? position + 1 : s->seq_lens[row]", "position + 1",
                            lambda k: k.test_features("non_causal", F32)),
    "the other KV head": (BOTH, "head * cache->stride[2]", "0 * cache->stride[2]",
                          lambda k: k.test_matches_the_reference("small_decode", F32)),
    "values not written": (BOTH, "i < 2 && at >= 0", "i < 1 && at >= 0",
                           lambda k: k.test_writes_its_slots_and_no_others(None, "NHD")),
    "written without scales": (BOTH, "by[i] == 1.f", "1", lambda k: k.test_scales_over_float_caches("alibi")),
    "scales exchanged where written": (BOTH, "{s->k_scale, s->v_scale}", "{s->v_scale, s->k_scale}",
                                       lambda k: k.test_writes_its_slots_and_no_others(None, "HND")),
    "heads as far apart as they are wide": (BOTH, "head * cache->stride[2]", "head * HEAD_DIM",
                                            lambda k: k.test_interleaved_caches(None, "NHD", F32)),
    "prefix twice": (BOTH, "first > s->first_key ? first : s->first_key", "first",
                     lambda k: k.test_shared_prefix("plain", True)),
    "soft cap dropped": (DECODE, "if (s->soft_cap)", "if (0)", lambda k: k.test_features("soft_cap", F32)),
    "sinks dropped": (DECODE, "if (s->sinks) sum +=", "if (0) sum +=", lambda k: k.test_features("sinks", F32)),
    "scale ignored": (DECODE, "s->scale * s->k_scale", "1 / sqrt(HEAD_DIM)",
                      lambda k: k.test_features("scale", F32)),
    "alibi of the wrong sign": (DECODE, "+= s->slopes[head]", "-= s->slopes[head]",
                                lambda k: k.test_features("alibi", F32)),
    "pages of another row": (DECODE, "s->first_pages[row]", "s->first_pages[0]",
                             lambda k: k.test_matches_the_reference("small_decode", F32)),
    "LSE of base 2": (DECODE, "high + logf(sum)", "high + log2f(sum)",
                      lambda k: k.test_matches_the_reference("small_decode", F32)),
    "padded rows left alone": (DECODE, "live ? out[d]", "1 ? out[d]",
                               lambda k: k.test_padded_rows_are_zero("small_decode", 5)),
    "keys read without their scale": (DECODE, "s->scale * s->k_scale", "s->scale",
                                      lambda k: k.test_scales_over_float_caches("plain")),
    "values read without their scale": (DECODE, "(float)s->v_scale / sum", "1 / sum",
                                        lambda k: k.test_scales_over_float_caches("sinks")),
    "soft cap dropped from prompts": (PREFILL, "if (s->soft_cap) x", "if (0) x",
                                      lambda k: k.test_features("soft_cap", F32)),
    "soft cap dropped where all is seen": (PREFILL, "&& !s->soft_cap", "", lambda k: k.test_features("soft_cap", F32)),
    "ALiBi dropped where all is seen": (PREFILL, "&& !s->slopes", "", lambda k: k.test_features("alibi", F32)),
    "sinks below the maximum dropped": (PREFILL, "else if (s->sinks) l += exp2f(sink - m)", "else l += 0",
                                        lambda k: k.test_features("sinks", F32)),
    "sinks above the maximum dropped": (PREFILL, "by = exp2f(m - sink), l = l * by + 1, m = sink", "by = 1",
                                        lambda k: k.test_features("sinks", F32)),
    "prompts without their scale": (PREFILL, "PER_WORD == 1 ? s->scale", "PER_WORD == 1 ? 0.5",
                                    lambda k: k.test_features("scale", F32)),
    OF_PAIRS: (PREFILL, "PER_WORD == 2 ? s->scale", "PER_WORD == 2 ? 0.5",
               lambda k: k.test_features("scale", torch.bfloat16)),
    "values of prompts without their scale": (PREFILL, "by * (float)s->v_scale", "by",
                                              lambda k: k.test_scales_over_float_caches("plain")),
    "prompts' ALiBi of the wrong sign": (PREFILL, "x += strip->slope", "x -= strip->slope",
                                         lambda k: k.test_features("alibi", F32)),
    "prompts' pages of another row": (PREFILL, "s->first_pages[row]", "s->first_pages[0]",
                                      lambda k: k.test_matches_the_reference("mixed_small", F32)),
    "prompts' LSE of base 2": (PREFILL, "(m + log2f(l)) * LN_2", "m + log2f(l)",
                               lambda k: k.test_matches_the_reference("mixed_small", F32)),
    "no maximum kept": (PREFILL, "shrink[w] = exp2_of(strip->part.m[w] - high[w])", "shrink[w] = (vec){0} + 1",
                        lambda k: k.test_windows_over_several_tiles(None, F32)),
    "nothing hidden": (PREFILL, "(key < strip->first[w]) | (key >= strip->stop[w])", "(ints){0}",
                       lambda k: k.test_window_edges(16)),
}  # fmt: skip
OF_TILES: dict[str, tuple[str, str, str, Callable[[Any], object]]] = {  # of AMX, in plain C
    "tiles without their scale": (PREFILL, "plain ? factor / LN_2", "plain ? 0.5",
                                  lambda k: k.test_features("scale", BF16)),
    "a maximum of tiles that stays": (PREFILL, "kept = keeps(strip, high, width)", "kept = 1",
                                      lambda k: k.test_matches_the_reference("mixed_small", BF16)),
    "what tiles had before as it was": (PREFILL, "!kept && !strip->fresh", "0",
                                        lambda k: k.test_maxima_of_other_tiles(True, BF16)),
    "tiles begun anew": (PREFILL, "if (strip->fresh) { EACH", "if (1) { EACH",
                         lambda k: k.test_windows_over_several_tiles(None, BF16)),
    "keys of the other tile": (PREFILL, "a + TILE_ROWS * size", "a",
                               lambda k: k.test_matches_the_reference("mixed_small", BF16)),
    "dimensions of the other tile": (PREFILL, "a + TILE_ROWS * TILE", "a",
                                     lambda k: k.test_matches_the_reference("mixed_small", BF16)),
    "queries of the other column": (PREFILL, "b + 1, WIDTH", "b, WIDTH",
                                    lambda k: k.test_windows_over_several_tiles(None, BF16)),
    "values of the other key": (PREFILL, "lines[1][key + 1]", "lines[1][key]",
                                lambda k: k.test_matches_the_reference("mixed_small", BF16)),
}  # fmt: skip


@pytest.fixture
def kit() -> BackendConformance:
    return type("Kit", (BackendConformance,), {"backend_name": "TORCH", "backend": TorchBackend})()


@pytest.fixture(autouse=True)
def _compiled_anew(name: str) -> Iterator[None]:
    with quick_native(**emulating() if name in OF_TILES else REFUSED):  # wrong in less time
        yield


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all: a source that a mutation leaves alone is compiled once."""
    return tmp_path_factory.mktemp("native")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=needs_products if name in OF_TILES or name == OF_PAIRS else ())
    for name in MUTATIONS | OF_TILES
])  # fmt: skip
@pytest.mark.sampled
def test_the_kit_fails_on(
    name: str, kit: Any, tmp_path: Path, compiled_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before, after, case = (MUTATIONS | OF_TILES)[name]
    case(kit)
    folder = paged_decode.SOURCE.parent
    for each in (DECODE, PREFILL, BOTH):
        text = (folder / each).read_text()
        if each == file:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (tmp_path / each).write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_here))
    for module in (paged_decode, paged_prefill):
        monkeypatch.setattr(module, "SOURCE", tmp_path / module.SOURCE.name)
    forget()
    with pytest.raises(AssertionError):
        case(kit)
