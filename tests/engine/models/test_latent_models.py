"""DeepSeek models in the engine: the latent cache under scheduling, preemption, the prefix cache and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from attn_backends import LLM, EngineConfig, SamplingParams, Unsupported
from attn_backends.cli.generate import stats_table
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.hf import ATTENTION_NAME
from attn_backends.engine.models.latent_layer import LatentAttention, use_latent_attention
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.helpers.tiny_models import LATENT_FAMILIES, save_tiny, tiny_model

LONG = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = ["a", "one two three", "the quick brown fox", "xyz" * 12, "the quick brown dog"]
BUSY = {"cache": {"num_pages": 15, "page_size": 4}, "scheduler": {"max_num_tokens": 11, "max_num_requests": 4}}


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param)


def engine(folder: Path, recorder: GraphSimulator | None = None, **settings: object) -> LLM:
    eager_form = {"accelerate": "off"}
    config = EngineConfig.model_validate({"cache": {"num_pages": 64}} | eager_form | settings)
    return LLM.from_pretrained(folder, config, recorder=recorder)


def tokens(llm: LLM, prompts: list[str] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, LONG)]


def test_matches_transformers_generate(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    llm = engine(folder)
    assert llm.selection.name == "TORCH_MLA"
    for prompt, got in zip(PROMPTS, tokens(llm), strict=True):
        ids = torch.tensor([llm.model.tokenizer(prompt).input_ids])
        expected = model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None)
        assert list(got) == expected[0, ids.shape[1] :].tolist()


def test_a_small_pool_and_packed_products_give_the_same_tokens(folder: Path) -> None:
    """Preemption and prompts in chunks; products as a CPU has them by default."""
    small = engine(folder, **BUSY)
    assert tokens(small) == tokens(engine(folder))
    assert small.stats.num_preemptions > 0
    packed = LLM.from_pretrained(folder, EngineConfig.model_validate({"cache": {"num_pages": 64}}))
    assert tokens(packed) == tokens(small)


def test_a_shared_prefix_is_found_and_changes_nothing(folder: Path) -> None:
    prompts = ["the same words at the start of every prompt, " + end for end in ("a", "be", "see")]
    expected = tokens(engine(folder, cache={"num_pages": 64, "prefix_caching": False}), prompts)
    llm = engine(folder)
    tokens(llm, prompts[:1])
    assert tokens(llm, prompts) == expected
    assert llm.stats.num_prefix_hit_tokens >= 3 * 32


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_graphs_give_the_tokens_of_eager(folder: Path, mode: str) -> None:
    settings = BUSY | {"graphs": {"mode": mode, "sizes": [1, 2, 4]}}
    llm = engine(folder, GraphSimulator(refuse_unreachable=True), **settings)
    assert tokens(llm) == tokens(engine(folder, **BUSY))
    assert llm.stats.num_graph_steps > llm.stats.num_steps / 2


def test_the_cache_is_small_and_the_figures_say_so(folder: Path) -> None:
    llm = engine(folder)
    assert llm.kv_bytes_per_token == 4 * (32 + 8) * 4  # layers, latent row, float32
    assert llm.expanded_kv_bytes_per_token == 4 * 4 * (24 + 12) * 4
    assert llm.runner.pool.num_bytes == 64 * 16 * llm.kv_bytes_per_token
    tokens(llm, ["a"])
    cells = [cell for column in stats_table(llm).columns for cell in column.cells]
    assert "640 bytes in latent rows; expanded keys and values would take 2,304" in cells


def test_a_plain_backend_is_refused_before_anything_runs(folder: Path) -> None:
    with pytest.raises(Unsupported, match="mla: got MLA"):
        engine(folder, backend="TORCH")


def test_fp8_rows_have_one_scale(folder: Path) -> None:
    llm = engine(folder, cache={"num_pages": 64, "dtype": "float8_e4m3fn", "k_scale": 0.5})
    assert [len(ids) for ids in tokens(llm)] == [16] * len(PROMPTS)
    with pytest.raises(ValueError, match="one scale"):
        engine(folder, cache={"num_pages": 64, "dtype": "float8_e4m3fn", "v_scale": 0.5})


def latent_to_be(family: str) -> Any:
    model: Any = tiny_model(family)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_a_module_that_would_differ_is_not_replaced(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_latent_attention(latent_to_be(family)) == 4
    rotation = "attn_backends.engine.models.latent_layer._rotation"
    monkeypatch.setattr(rotation, lambda attention: lambda query, key, angles: (query, key))
    with pytest.raises(ModelError, match="layer 0 on latent rows is off by"):
        use_latent_attention(latent_to_be(family))


def test_weights_are_shared_with_the_module_replaced() -> None:
    model = latent_to_be("deepseek_v3")
    before = model.model.layers[0].self_attn.kv_b_proj.weight
    use_latent_attention(model)
    latent = model.model.layers[0].self_attn
    assert isinstance(latent, LatentAttention)
    assert latent.kv_b_proj.data_ptr() == before.data_ptr()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_gives_the_same_tokens(folder: Path) -> None:
    settings = BUSY | {"device": "cuda", "dtype": "float32", "backend": "TORCH_MLA", "graphs": {"mode": "none"}}
    assert tokens(engine(folder, **settings)) == tokens(engine(folder, device="cpu"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_graphs_on_a_gpu_give_the_tokens_of_eager(tmp_path: Path, family: str, mode: str) -> None:
    """In bfloat16: in other dtypes experts cannot be captured."""
    folder = save_tiny(tmp_path / family, family, v_head_dim=16)
    settings = BUSY | {"device": "cuda", "dtype": "bfloat16", "backend": "TORCH_MLA"}
    expected = tokens(engine(folder, **settings, graphs={"mode": "none"}))
    assert tokens(engine(folder, **settings, graphs={"mode": mode, "sizes": [1, 2, 3, 4]})) == expected


@pytest.mark.gpu
@needs_gpu
def test_experts_that_cannot_be_captured(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"device": "cuda", "dtype": "float32", "backend": "TORCH_MLA"}
    with pytest.raises(RuntimeError, match=r"set graphs\.mode to none or auto"):
        engine(folder, **settings, graphs={"mode": "full", "sizes": [1]})
    assert len(tokens(engine(folder, **settings, graphs={"sizes": [1]}))) == len(PROMPTS)
    assert "steps run eager" in caplog.text
