"""End tokens of a model folder: those that its files name, the tokenizer's where they name none, wrong ones refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import EngineConfig
from attn_backends.engine.models.checkpoint import ModelError
from attn_backends.engine.models.load import load_model

OF_TOKENIZER = 2
End = Callable[[str | None], frozenset[int]]


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def end(folder: Path) -> End:
    """The end tokens of a tiny checkpoint with this generation_config.json; None: without one."""

    def load(text: str | None) -> frozenset[int]:
        file = folder / "generation_config.json"
        file.unlink() if text is None else file.write_text(text)
        return load_model(EngineConfig(model=str(folder)), torch.device("cpu")).eos_token_ids

    return load


@pytest.mark.parametrize(
    ("said", "expected"),
    [(257, {257}), ([257, 46], {46, 257}), (0, {0}), ([], {OF_TOKENIZER}), (None, {OF_TOKENIZER}),
     (99999, {OF_TOKENIZER}), ([259, 46, -1], {46})],
    ids=str,
)  # fmt: skip
def test_the_files_end_tokens_or_the_tokenizers(end: End, said: Any, expected: set[int]) -> None:
    assert end(json.dumps({"eos_token_id": said})) == expected


@pytest.mark.parametrize("text", ['{"eos_token_id": [257, 4', "", "\x00\xff"])
def test_a_damaged_file_is_no_missing_one(end: End, text: str) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json cannot be read as JSON: .*Fetch it again"):
        end(text)


def test_a_file_that_holds_no_object(end: End) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json holds \[257\], and no JSON object: fetch it again"):
        end("[257]")


@pytest.mark.parametrize("said", ["257", [257, "46"], True, 2.5, [[257]], {"a": 1}], ids=str)
def test_wrong_end_tokens(end: End, said: Any) -> None:
    words = r"generation_config.json: eos_token_id is .*; allowed: a whole number from 0 to 258, or a list of them"
    with pytest.raises(ModelError, match=words):
        end(json.dumps({"eos_token_id": said}))
