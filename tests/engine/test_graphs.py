"""The engine through graphs, recorded and replayed on a CPU: the same tokens as eager, whatever the load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from attn_backends import LLM, CudaGraphSupport, EngineConfig, SamplingParams, Unsupported
from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.engine.graphs import GraphKey, SizeLadder, default_sizes
from attn_backends.testing.graphs.simulator import GraphSimulator
from tests.helpers.tiny_models import FAMILIES, save_tiny

LONG = SamplingParams(max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)  # and longer than any window, with their prompts
PROMPTS = ["a", "one two three", "the quick brown fox", "xyz" * 12, "the quick brown dog"]
BUSY = {"cache": {"num_pages": 17, "page_size": 4}, "scheduler": {"max_num_tokens": 9, "max_num_requests": 4}}


def engine(folder: Path, simulate: bool = True, **settings: object) -> LLM:
    eager_form = {"accelerate": "off"}  # as on a GPU
    config = EngineConfig.model_validate({"cache": {"num_pages": 64}} | eager_form | settings)
    return LLM.from_pretrained(folder, config, recorder=GraphSimulator(refuse_unreachable=True) if simulate else None)


def tokens(llm: LLM, sampling: SamplingParams = LONG) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, sampling)]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_eager(tmp_path: Path, family: str, mode: str) -> None:
    folder = save_tiny(tmp_path / family, family)
    settings = BUSY | {"graphs": {"mode": mode, "sizes": [1, 2, 4]}}
    llm = engine(folder, **settings)
    assert tokens(llm, SHORT) == tokens(engine(folder, simulate=False, **BUSY), SHORT)
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_graph_steps > llm.stats.num_steps / 2


def test_batches_between_sizes_are_padded_and_larger_ones_run_eager(tiny_llama: Path) -> None:
    llm = engine(tiny_llama, graphs={"mode": "full", "sizes": [1, 3]}, scheduler={"max_num_requests": 4})
    assert tokens(llm) == tokens(engine(tiny_llama, simulate=False))
    assert 0 < llm.stats.num_graph_steps < llm.stats.num_steps - 1


@pytest.mark.parametrize("num_steps", [1, 5])
def test_rows_longer_than_graphs_gather_run_eager(tiny_llama: Path, num_steps: int) -> None:
    options = {"backend": "TORCH", "backend_options": {"graph_max_seq_len": 50}}
    llm = engine(tiny_llama, **options, scheduler={"decode_steps_per_launch": num_steps})
    assert tokens(llm) == tokens(engine(tiny_llama, simulate=False))
    assert 0 < llm.stats.num_graph_steps < llm.stats.num_steps


def test_the_default_model_in_small(tmp_path: Path) -> None:
    """SmolLM2's heads and tied embeddings, several steps a launch, prefixes shared, requests preempted."""
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    folder = save_tiny(tmp_path / "smollm2", "llama", num_hidden_layers=2, **shape)
    settings = {"cache": {"num_pages": 11, "page_size": 8}, "scheduler": {"decode_steps_per_launch": 4}}
    llm, eager = engine(folder, **settings), engine(folder, simulate=False, cache=settings["cache"])
    for _ in range(2):  # the second finds prompts in the prefix cache
        assert tokens(llm) == tokens(eager)
    assert llm.stats.num_graph_steps > 0
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("max_num_requests", [5, 16])
def test_several_steps_a_launch_in_pieces(tiny_llama: Path, max_num_requests: int) -> None:
    """Padding of one token a row is advanced with the rest; with a row of several the launch goes on eager."""
    scheduler = {"decode_steps_per_launch": 4, "max_num_requests": max_num_requests}
    llm = engine(tiny_llama, graphs={"mode": "piecewise", "sizes": [1, 16]}, scheduler=scheduler)
    assert tokens(llm) == tokens(engine(tiny_llama, simulate=False))
    assert (llm.stats.num_graph_steps > llm.stats.num_steps / 2) == (max_num_requests == 16)


def test_rows_of_several_tokens_have_graphs_of_their_own(tiny_llama: Path) -> None:
    """Prompts of three tokens, as a verify step would be: one graph, with the logits of eager."""
    llm = engine(tiny_llama, graphs={"mode": "full", "sizes": [2, 4], "query_lens": [1, 3]})
    eager = engine(tiny_llama, simulate=False)
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    sampling = SamplingParams(max_tokens=1)
    expected = [output.token_ids for output in eager.generate(prompts, sampling)]
    assert [output.token_ids for output in llm.generate(prompts, sampling)] == expected
    assert (llm.stats.num_steps, llm.stats.num_graph_steps) == (1, 1)
    assert llm.runner.graphs.fit(np.array([3, 3, 3])) == GraphKey(4, 3)
    assert llm.runner.graphs.fit(np.array([3, 3, 1])) is None
    assert llm.runner.graphs.fit(np.array([2, 2])) is None


def test_sizes() -> None:
    assert default_sizes(64) == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
    assert default_sizes(600)[-4:] == (512, 544, 576, 600)
    assert default_sizes(3) == (1, 2, 3)
    ladder = SizeLadder((4, 1, 4, 8))
    assert [ladder.fit(n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert list(ladder) == [8, 4, 1]


@pytest.mark.parametrize(("graphs", "said"), [
    ({"mode": "full", "sizes": [66]}, "66 rows of 1 tokens"),
    ({"mode": "piecewise", "sizes": [4096]}, "4096 tokens"),
])  # fmt: skip
def test_sizes_above_the_limits_are_refused(tiny_llama: Path, graphs: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine(tiny_llama, graphs=graphs)


def test_graphs_without_a_gpu_or_a_backend_for_them_are_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="cpu has no CUDA graphs"):
        engine(tiny_llama, simulate=False, graphs={"mode": "full"})
    declared = TorchBackend.capabilities()
    single = replace(declared, cuda_graph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    never = replace(declared, cuda_graph=CudaGraphSupport.NEVER)
    for can, graphs, hint in ((single, {"mode": "full", "query_lens": [1, 2]}, "query_lens"),
                              (never, {"mode": "full"}, "piecewise")):  # fmt: skip
        monkeypatch.setattr(TorchBackend, "capabilities", staticmethod(lambda can=can: can))
        with pytest.raises(Unsupported, match=hint):
            engine(tiny_llama, graphs=graphs)
    assert engine(tiny_llama).runner.graphs is None, "auto asks for none where the backend has none"


def test_auto_runs_eager_what_cannot_be_captured(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = LlamaMLP.forward

    def reads_the_device(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden) * float(hidden.abs().sum() >= 0)

    monkeypatch.setattr(LlamaMLP, "forward", reads_the_device)
    llm = engine(tiny_llama)
    assert "steps run eager" in caplog.text
    assert tokens(llm) == tokens(engine(tiny_llama, simulate=False))
    with pytest.raises(RuntimeError, match=r"set graphs\.mode to none or auto.*reads"):
        engine(tiny_llama, graphs={"mode": "full"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_cuda_graphs_give_the_tokens_of_eager(tmp_path: Path, family: str, mode: str) -> None:
    folder = save_tiny(tmp_path / family, family)
    settings = BUSY | {"device": "cuda", "dtype": "float32"}
    llm = engine(folder, simulate=False, **settings | {"graphs": {"mode": mode, "sizes": [1, 2, 4]}})
    assert tokens(llm) == tokens(engine(folder, simulate=False, **settings | {"graphs": {"mode": "none"}}))
    assert llm.stats.num_graph_steps > llm.stats.num_steps / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_several_steps_a_launch_on_a_gpu(tiny_llama: Path) -> None:
    settings = {"device": "cuda", "dtype": "float32", "scheduler": {"decode_steps_per_launch": 4}}
    llm = engine(tiny_llama, simulate=False, **settings)
    assert tokens(llm) == tokens(engine(tiny_llama, simulate=False, device="cuda", dtype="float32"))
    assert llm.stats.num_graph_steps > 0, "auto captures on a GPU"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("mode", ["none", "full", "piecewise"])
def test_a_compiled_model_in_cuda_graphs(tiny_llama: Path, mode: str) -> None:
    settings = BUSY | {"device": "cuda", "dtype": "float32"}
    llm = engine(
        tiny_llama, simulate=False, accelerate="compile", **settings | {"graphs": {"mode": mode, "sizes": [1, 4]}}
    )
    assert tokens(llm) == tokens(engine(tiny_llama, simulate=False, **settings | {"graphs": {"mode": "none"}}))
    assert (llm.stats.num_graph_steps > llm.stats.num_steps / 2) == (mode != "none")
