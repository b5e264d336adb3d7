"""Scales of keys and values that a checkpoint brings for fp8 caches, by layer.

Names, as quantisers write them and vLLM reads them: `layers.N.self_attn.k_scale` and `v_scale` (compressed-tensors),
`k_proj.k_scale` and `v_proj.v_scale` (ModelOpt), `kv_scale` for both (AutoFP8), `k_proj.output_scale` and
`v_proj.output_scale` (Quark, older compressed-tensors). A stored value times its scale is the real one.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from attn_backends.engine.config import CacheConfig
from attn_backends.engine.models.checkpoint import ModelError, read_json, weight_files
from attn_backends.spec import FP8_DTYPES, AttentionSpec, MLASpec

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(?:^|\.)(?:layers|h|blocks)\.(?P<layer>\d+)\.(?:\w+\.)*?"
    r"(?P<last>(?:k|v|kv)_scale|[kv]_proj\.output_scale|[kv]_zero_point)$"
)
_OTHER_TOWERS = re.compile(r"vision|visual|audio")  # whose layers have numbers of their own
_SERVED = {"strategy": "tensor", "num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
OR_ELSE = "set cache.k_scale and cache.v_scale to use those for every layer, or cache.dtype: auto, which needs none"


class KVScales(NamedTuple):
    """One layer's scales: a cached key times `k_scale` is the real one, and a value times `v_scale`."""

    k_scale: float = 1.0
    v_scale: float = 1.0


def kv_scales(
    cache: CacheConfig, specs: Mapping[int, AttentionSpec], folder: Path | None
) -> dict[int, KVScales] | None:
    """Scales of every layer: the config's where it has them, else the checkpoint's for an fp8 cache, else 1; None where
    the config asks to have them worked out.

    Args:
        folder: where the checkpoint is; None for a model that came from elsewhere.

    Raises:
        ModelError: the checkpoint brings scales, and the config asks to have them worked out; or those that it brings
            for the fp8 cache that is asked for are not one positive number for the keys of each layer and one for its
            values.
    """
    given = {name: scale for name in KVScales._fields if (scale := getattr(cache, name)) is not None}
    found = {} if folder is None or len(given) == len(KVScales._fields) else _of_checkpoint(folder, specs)
    if cache.calculate_kv_scales and found:
        raise ModelError(f"{folder} brings KV scales: leave cache.calculate_kv_scales out to use them, or {OR_ELSE}")
    if cache.calculate_kv_scales:
        return None
    return {layer: found.get(layer, KVScales())._replace(**given) for layer in specs}


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor says how its cached keys and values are scaled."""
    return _NAME.search(name) is not None


def _of_checkpoint(folder: Path, specs: Mapping[int, AttentionSpec]) -> dict[int, KVScales]:
    names = [name for name, *_ in _ours(folder, specs)]
    dtypes = {spec.cache_dtype for spec in specs.values()}
    if dtypes.isdisjoint(FP8_DTYPES):
        if names:
            logger.warning(
                "%s brings scales for an fp8 KV cache, as %s; a cache of %s stores keys and values as they are: set "
                "cache.dtype: float8_e4m3fn to use them", folder, names[0], ", ".join(map(str, dtypes)),
            )  # fmt: skip
        return {}
    config = read_json(folder / "config.json")
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    scheme = (quantization or {}).get("kv_cache_scheme") or {}
    wrong = [f"{name} {scheme[name]}" for name, served in _SERVED.items() if scheme.get(name, served) != served]
    modelopt = folder / "hf_quant_config.json"
    algorithm = read_json(modelopt).get("quantization", {}).get("kv_cache_quant_algo") if modelopt.is_file() else None
    if algorithm not in (None, "FP8"):
        wrong.append(f"kv_cache_quant_algo {algorithm}")
    if wrong:
        raise ModelError(
            f"the KV cache of {folder} is quantised with {', '.join(wrong)}; served is one static fp8 scale a layer "
            f"for keys and one for values: {OR_ELSE}"
        )
    if not names:
        return {}
    found = _read(folder, specs)
    missing = [layer for layer in specs if layer not in found]
    if missing:
        raise ModelError(f"{folder} brings KV scales of layers {_few(found)}, and none of {_few(missing)}: {OR_ELSE}")
    return {layer: _of_layer(layer, isinstance(spec, MLASpec), found[layer]) for layer, spec in specs.items()}


def _read(folder: Path, layers: Collection[int]) -> dict[int, dict[str, float]]:
    """What the checkpoint's files hold: by layer, "k" and "v"."""
    found: dict[int, dict[str, float]] = {}
    for name, layer, last, tensors in _ours(folder, layers):
        tensor = tensors.get_tensor(name)
        if name.endswith("zero_point"):
            raise ModelError(f"{name}: a KV cache with zero points (asymmetric) is not served: {OR_ELSE}")
        if tensor.numel() != 1:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}: scales by head, channel or token are not served, one number a "
                f"layer is: {OR_ELSE}"
            )
        scale = float(tensor.float())
        if not (math.isfinite(scale) and scale > 0):
            raise ModelError(f"{name} is {scale}; a scale is a positive number: {OR_ELSE}")
        for part in last.partition("_")[0]:  # "k", "v", or both
            if found.setdefault(layer, {}).setdefault(part, scale) != scale:
                raise ModelError(f"{name} is another {part}_scale of layer {layer} than before it: {OR_ELSE}")
    return found


def _ours(folder: Path, layers: Collection[int]) -> Iterator[tuple[str, int, str, Any]]:
    """The names that say something of these layers' caches, each with its layer's number, its end, which says what it
    is, and the open file. A checkpoint may hold other towers and more layers."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for match in filter(None, map(_NAME.search, tensors.keys())):
                name, layer = match.string, int(match["layer"])
                if layer in layers and not _OTHER_TOWERS.search(name):
                    yield name, layer, match["last"], tensors


def _of_layer(layer: int, is_mla: bool, found: Mapping[str, float]) -> KVScales:
    if is_mla and "k" in found:  # a latent row has one scale
        return KVScales(found["k"])
    if len(found) < len(KVScales._fields):
        raise ModelError(f"the checkpoint brings only the {next(iter(found))}_scale of layer {layer}: {OR_ELSE}")
    return KVScales(found["k"], found["v"])


def _few(layers: Collection[int]) -> str:
    numbers = sorted(layers)
    return ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
