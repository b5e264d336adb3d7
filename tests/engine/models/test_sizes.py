"""A model's config.json with anything in it: refused in our words, or run; never a traceback of a library's."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_backends import EngineConfig
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.hf import LIMITS, why_not_sizes
from attn_backends.engine.models.load import layer_specs, load_model
from attn_backends.engine.resolve import resolve_device
from attn_backends.testing.cases.models import published_models

CPU = resolve_device("cpu")


@pytest.fixture
def changed(tmp_path: Path, tiny_llama: Path) -> Callable[..., EngineConfig]:
    """The config of an engine for a tiny checkpoint whose config.json has changed; a value of `...` is left out."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    whole = json.loads((folder / "config.json").read_text())

    def change(change: dict[str, Any] | str) -> EngineConfig:
        text = change
        if isinstance(change, dict):
            text = json.dumps({name: value for name, value in (whole | change).items() if value is not ...})
        (folder / "config.json").write_text(str(text))
        return EngineConfig(model=str(folder), device="cpu")

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads is 3 and num_key_value_heads 2: the first must be"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 62}, "hidden_size is 62 and num_attention_heads 4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; allowed: a whole number from 1 to 65536"),
        ({"hidden_size": -64}, "hidden_size is -64; allowed"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; allowed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; allowed: a whole number from 1 to 4096"),
        ({"num_hidden_layers": 4000}, "num_hidden_layers is 4000, and the weights have 39 tensors, fewer than layers"),
        ({"num_hidden_layers": 5}, "lack 9 tensors"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; allowed"),
        ({"vocab_size": 300}, r"do not fit its config.json: .* has shape \[259, 64\] where .* \[300, 64\]"),
        ({"head_dim": 16.5}, "head_dim is 16.5; allowed"),
        ({"hidden_size": "64"}, "hidden_size is '64'; allowed"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True; allowed"),
        ({"hidden_size": ...}, "do not fit its config.json"),
        ({"model_type": ...}, "says no model_type"),
        ({"model_type": "nonsense"}, "says model_type 'nonsense'; transformers .* has no such model: give a model"),
        ({"model_type": ["llama"]}, r"says model_type \['llama'\]"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}, "set ATTN_BACKENDS_TRUST_REMOTE_CODE=true"),
        ({"hidden_act": "nope"}, "cannot load .*nope"),
        ({"dtype": "float99"}, "cannot read the config"),
        ("", "cannot be read as JSON"),
        ("[1]", r"holds \[1\], and no JSON object"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_said(changed: Callable[..., EngineConfig], change: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(changed(change), CPU)


WRONG: list[Any] = [..., None, 0, -1, 1, 3, 5, 63, 10**6, 10**9, 10**20, 2.5, float("nan"), True, "64", "", [], [4], {}]


@pytest.mark.parametrize("seed", range(40))
def test_any_config_is_refused_in_our_words_or_runs(seed: int, changed: Callable[..., EngineConfig]) -> None:
    rng = random.Random(seed)
    names = [*LIMITS, "rope_parameters", "rms_norm_eps", "hidden_act", "layer_types", "dtype", "tie_word_embeddings",
             "quantization_config", "eos_token_id", "text_config", "architectures", "attention_bias"]  # fmt: skip
    change = {name: rng.choice(WRONG) for name in rng.sample(names, rng.randint(1, 2))}
    config = changed(change)
    for load in (load_model, layer_specs):
        try:
            load(config, CPU)
        except ModelError as error:
            assert len(str(error)) > 30, change  # noqa: PT017 (either outcome is right)


def test_published_models_have_possible_sizes() -> None:
    for model in published_models():
        heads = {"num_attention_heads": model.num_qo_heads, "num_key_value_heads": model.num_kv_heads,
                 "head_dim": model.head_dim}  # fmt: skip
        assert why_not_sizes(heads) is None, model
