"""Deep copies of what a step holds, to compare later: metadata, inputs, pools."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch


def snapshot(value: Any) -> Any:
    """Plain containers of everything inside: tensors and arrays become (dtype, shape, bytes), NaN included."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: snapshot(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return value


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Where two snapshots differ, as paths such as "slot_mapping" or "rows.0.pages"."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        start = f"{path}." if path else ""
        return [found for key in before for found in differences(before[key], after[key], f"{start}{key}")]
    return [] if before == after else [path or "the whole"]
