"""What layers are measured at: decodes of few and many requests, short and long, and prompts; within limits. Layers are
those of a model, or of a YAML file of heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from attn_backends.registry import Load
from attn_backends.spec import AttentionSpec, MLASpec, new_kv_shapes
from attn_backends.validation import config_error
from attn_backends.yaml_values import read_yaml

Phase = Literal["prefill", "decode"]
DECODES = tuple(product((64, 8, 1, 256), (1024, 8192, 256, 32768)))  # requests and keys, those that matter most first
PROMPTS = ((1, 2048), (16, 256), (1, 8192), (4, 2048), (64, 128), (1, 512))  # prompts and tokens of each
EXAMPLE = "layers: [{num_qo_heads: 32, num_kv_heads: 8, head_dim: 128, count: 32}]"


class LoadCase(NamedTuple):
    """One load of one phase."""

    phase: Phase
    load: Load

    @property
    def query_len(self) -> int:
        return self.load.num_keys if self.phase == "prefill" else 1

    def __str__(self) -> str:
        what = "prompts of" if self.phase == "prefill" else "decodes of"
        return f"{self.load.num_requests} {what} {self.load.num_keys}"


def cases(max_model_len: int, max_num_requests: int, most_tokens: int, most_keys: int) -> list[LoadCase]:
    """Loads of both phases in turns, those that matter most first. Lengths above the model's limit are that limit.

    Args:
        most_tokens: query tokens of a step, at most.
        most_keys: keys that there is memory for.
    """
    decodes = _fitting("decode", DECODES, max_model_len, max_num_requests, most_keys)
    prompts = _fitting("prefill", PROMPTS, max_model_len, max_num_requests, min(most_tokens, most_keys))
    return [case for case in chain(*zip_longest(decodes, prompts)) if case is not None]


def _fitting(
    phase: Phase, loads: Iterable[tuple[int, int]], max_model_len: int, max_num_requests: int, most_keys: int
) -> list[LoadCase]:
    made = {LoadCase(phase, Load(min(requests, max_num_requests), min(keys, max_model_len))): None
            for requests, keys in loads}  # fmt: skip
    return [case for case in made if case.load.num_requests * case.load.num_keys <= most_keys]


def bytes_per_key(spec: AttentionSpec) -> int:
    """What one token takes in a layer's cache."""
    return sum(map(math.prod, new_kv_shapes(spec))) * spec.cache_dtype.itemsize


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
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read --layers {path}: {error}; write, for one, {EXAMPLE}") from error
    try:
        return TypeAdapter(LayersFile).validate_python(content if isinstance(content, dict) else {})
    except ValidationError as error:
        raise config_error(error, LayersFile, lambda key: f"file {path}") from error
