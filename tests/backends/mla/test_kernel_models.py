"""Tiny DeepSeek models on the kernel backends of the MLA family: against transformers, and graphs against eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_backends import LLM, EngineConfig, SamplingParams, Unsupported, get_backend
from attn_backends.registry.table import BackendImportError
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.helpers import flashinfer_mla_emulated, flashmla_emulated  # noqa: F401 (they register)
from tests.helpers.best_tokens import assert_best_tokens
from tests.helpers.tiny_models import save_tiny

WIDTHS: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}
PROMPTS = ["a", "the quick brown fox", "xyz" * 25, "the quick brown dog"]  # one is longer than a page of 64
LONG = SamplingParams(max_tokens=10, ignore_eos=True)
SCHEDULER = {"max_num_tokens": 24, "max_num_requests": 4}
POOLS = {"FLASHMLA": {"num_pages": 8}, "FLASHINFER_MLA": {"num_pages": 50, "page_size": 4}}

PLACES = [
    pytest.param("FLASHMLA_EMULATED", "cpu", id="flashmla"),
    pytest.param("FLASHMLA_EMULATED_OLDER", "cpu", id="flashmla-older"),
    pytest.param("FLASHINFER_MLA_EMULATED", "cpu", id="flashinfer"),
    pytest.param("FLASHMLA", "cuda", id="flashmla-cuda", marks=pytest.mark.gpu),
    pytest.param("FLASHINFER_MLA", "cuda", id="flashinfer-cuda", marks=pytest.mark.gpu),
]
everywhere = pytest.mark.parametrize(("name", "device"), PLACES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("deepseek_v2", "deepseek_v3")
    return {family: save_tiny(tmp_path_factory.mktemp(family), family, **WIDTHS) for family in families}


def engine(folder: Path, name: str, device: str, **settings: object) -> LLM:
    if device == "cuda":
        try:
            get_backend(name)
        except BackendImportError as error:
            pytest.skip(str(error))
    config = {"backend": name, "device": device, "dtype": "float16", "accelerate": "off",
              "scheduler": SCHEDULER, "cache": POOLS[name.partition("_EMULATED")[0]]}  # fmt: skip
    recorder = GraphSimulator(refuse_unreachable=True) if device == "cpu" and "sizes" in str(settings) else None
    return LLM.from_pretrained(folder, EngineConfig.model_validate(config | settings), recorder=recorder)


@everywhere
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_against_transformers_eager(folders: dict[str, Path], family: str, name: str, device: str) -> None:
    llm = engine(folders[family], name, device, graphs={"mode": "none"})
    assert_best_tokens(llm, folders[family], family, PROMPTS, LONG, **WIDTHS)


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(*place.values, id=place.id, marks=(*place.marks, *[pytest.mark.long] * ("older" in str(place.id))))
     for place in PLACES],
)  # fmt: skip
def test_graphs_give_the_tokens_of_eager_steps(folders: dict[str, Path], name: str, device: str) -> None:
    folder = folders["deepseek_v3"]
    settings = {"dtype": "bfloat16"} if device == "cuda" else {}  # experts are captured in no other there
    eager = engine(folder, name, device, graphs={"mode": "none"}, **settings)
    expected = [output.token_ids for output in eager.generate(PROMPTS, LONG)]
    for mode in ("full", "piecewise"):
        llm = engine(folder, name, device, graphs={"mode": mode, "sizes": [1, 2, 3, 4]}, **settings)
        assert [output.token_ids for output in llm.generate(PROMPTS, LONG)] == expected, mode
        assert llm.stats.num_graph_steps > llm.stats.num_steps / 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"cache": {"num_pages": 8, "page_size": 16}}, "page_size: got 16; supported: 64"),
        ({"dtype": "float32"}, "dtype: got float32"),
        ({"cache": {"num_pages": 8, "page_size": 64, "dtype": "float8_e5m2"}}, "cache_dtype: got float8_e5m2"),
    ],
)
def test_an_engine_refuses_before_anything_runs(folders: dict[str, Path], settings: dict[str, Any], told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        engine(folders["deepseek_v3"], "FLASHMLA_EMULATED", "cpu", **settings)


def test_a_cache_of_another_width_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "deepseek_v3")
    for name in ("FLASHMLA_EMULATED", "FLASHINFER_MLA_EMULATED"):
        with pytest.raises(Unsupported, match="kv_lora_rank: got 32; supported: 512"):
            engine(folder, name, "cpu")
