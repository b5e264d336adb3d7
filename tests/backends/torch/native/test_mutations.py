"""The kit finds what is wrong in C too: it fails on every mutation of the decode kernel's source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.native import paged_decode
from attn_backends.testing.conformance import BackendConformance

F32 = torch.float32
MUTATIONS: dict[str, tuple[str, str, Callable[[Any], object]]] = {  # what is there, what takes its place, a case
    "window off by one": ("last - s->window_left", "last - s->window_left + 1", lambda k: k.test_window_edges(16)),
    "chunk edge off by one": ("first = last / s", "first = (last + 1) / s", lambda k: k.test_chunk_edges(16)),
    "soft cap dropped": ("if (s->soft_cap)", "if (0)", lambda k: k.test_features("soft_cap", F32)),
    "sinks dropped": ("if (s->sinks) sum +=", "if (0) sum +=", lambda k: k.test_features("sinks", F32)),
    "scale ignored": ("s->scale * s->k_scale", "1 / sqrt(HEAD_DIM)", lambda k: k.test_features("scale", F32)),
    "alibi of the wrong sign": ("+= s->slopes[head]", "-= s->slopes[head]", lambda k: k.test_features("alibi", F32)),
    "one key short": ("*stop = last + 1;", "*stop = last;", lambda k: k.test_page_sizes_and_layouts(16, "NHD")),
    "tail of a page read": ("*stop = last + 1;", "*stop = last + 2;", lambda k: k.test_nan_never_leaks("plain", None)),
    "pages of another row": ("s->first_pages[row]", "s->first_pages[0]",
                             lambda k: k.test_matches_the_reference("small_decode", F32)),
    "the other KV head": ("head * cache->stride[2]", "0 * cache->stride[2]",
                          lambda k: k.test_matches_the_reference("small_decode", F32)),
    "values not written": ("i < 2 && at >= 0", "i < 1 && at >= 0",
                           lambda k: k.test_writes_its_slots_and_no_others(None, "NHD")),
    "LSE of base 2": ("high + logf(sum)", "high + log2f(sum)",
                      lambda k: k.test_matches_the_reference("small_decode", F32)),
    "padded rows left alone": ("live ? out[d]", "1 ? out[d]",
                               lambda k: k.test_padded_rows_are_zero("small_decode", 5)),
    "keys read without their scale": ("s->scale * s->k_scale", "s->scale",
                                      lambda k: k.test_scales_over_float_caches("plain", F32)),
    "values read without their scale": ("(float)s->v_scale / sum", "1 / sum",
                                        lambda k: k.test_scales_over_float_caches("sinks", F32)),
    "written without scales": ("by[i] == 1.f", "1", lambda k: k.test_scales_over_float_caches("alibi", F32)),
    "scales exchanged where written": ("{s->k_scale, s->v_scale}", "{s->v_scale, s->k_scale}",
                                       lambda k: k.test_writes_its_slots_and_no_others(None, "HND")),
    "heads as far apart as they are wide": ("head * cache->stride[2]", "head * HEAD_DIM",
                                            lambda k: k.test_interleaved_caches(None, "NHD", F32)),
    "prefix twice": ("first > s->first_key ? first : s->first_key", "first",
                     lambda k: k.test_shared_prefix("plain", True)),
}  # fmt: skip


@pytest.fixture
def kit() -> BackendConformance:
    return type("Kit", (BackendConformance,), {"backend_name": "TORCH", "backend": TorchBackend})()


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    paged_decode._compiled.cache_clear()
    yield
    paged_decode._compiled.cache_clear()


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_kit_fails_on(name: str, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, case = MUTATIONS[name]
    case(kit)
    text = paged_decode.SOURCE.read_text()
    assert text.count(before) == 1
    mutated = tmp_path / "mutated.c"
    mutated.write_text(text.replace(before, after))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(paged_decode, "SOURCE", mutated)
    paged_decode._compiled.cache_clear()
    with pytest.raises(AssertionError):
        case(kit)
