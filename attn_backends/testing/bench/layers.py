"""Layers to measure, from a YAML file of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from attn_backends.spec import AttentionSpec, MLASpec
from attn_backends.validation import config_error

EXAMPLE = "layers: [{num_qo_heads: 32, num_kv_heads: 8, head_dim: 128, count: 32}]"


class LayerHeads(BaseModel):
    """Layers that are alike. With `kv_lora_rank` they are of multi-head latent attention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_qo_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int = Field(ge=1)
    head_dim_vo: int | None = None
    count: int = Field(1, ge=1)
    window_left: int = -1
    logits_soft_cap: float | None = None
    sinks: bool = False
    chunk_size: int | None = None
    scale: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    def spec(self, dtype: torch.dtype) -> AttentionSpec:
        """What such a layer asks.

        Raises:
            ValueError: the numbers do not go together.
        """
        given: dict[str, Any] = {name: value for name, value in self if name != "count" and value is not None}
        kind = AttentionSpec if self.kv_lora_rank is None else MLASpec
        if kind is AttentionSpec:
            given.setdefault("num_kv_heads", self.num_qo_heads)
        return kind(**given, dtype=dtype)


class LayersFile(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: tuple[LayerHeads, ...] = Field(min_length=1)
    max_model_len: int = Field(32768, ge=1)


def read_layers(path: Path) -> LayersFile:
    """The layers of a file.

    Raises:
        ConfigError: it is no such file; names every problem and what is allowed.
        ValueError: it cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read --layers {path}: {error}; write, for one, {EXAMPLE}") from error
    try:
        return TypeAdapter(LayersFile).validate_python(content if isinstance(content, dict) else {})
    except ValidationError as error:
        raise config_error(error, LayersFile, lambda key: f"file {path}") from error
