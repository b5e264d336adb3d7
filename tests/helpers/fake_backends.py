"""Backends for registry tests: complete classes that compute nothing, and plugins installed in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attn_backends.interface import (
    CONTRACT,
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
)
from attn_backends.interface.capabilities import Capabilities


def fake_backend(
    name: str, class_name: str = "Fake", module: str = __name__, **capabilities: Any
) -> type[AttentionBackend]:
    """A backend class of this name; everywhere equal but in its capabilities."""
    can = {"devices": {"cpu"}, "dtypes": {torch.float32}, "cache_dtypes": {torch.float32}} | capabilities
    can = {key: frozenset(value) if isinstance(value, set) else value for key, value in can.items()}
    attributes = {
        "contract": CONTRACT,
        "name": name,
        "impl_cls": AttentionImpl,
        "metadata_cls": AttentionMetadata,
        "builder_cls": AttentionMetadataBuilder,
        "state_cls": AttentionState,
        "capabilities": staticmethod(lambda: Capabilities(**can)),
    }
    return type(class_name, (AttentionBackend,), attributes | {"__module__": module})


def install_plugin(folder: Path, package: str, entry_points: str, **modules: str) -> None:
    """What pip leaves behind: modules, and a dist-info with entry points. The folder must be on sys.path."""
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[attn_backends.backends]\n{entry_points}\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
