"""TORCH, but for cases that kill the process, hang it or raise: what `verify --import` is given in tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.registry import register_backend


class DyingImpl(TorchImpl):
    def forward(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        if len(query) % 3 == 0:
            print("the last words of a kernel", flush=True)
            os.kill(os.getpid(), 11)
        return super().forward(query, *args, **kwargs)


@register_backend("DYING")
class DyingBackend(TorchBackend):
    name = "DYING"
    impl_cls = DyingImpl


class FullImpl(TorchImpl):
    """A library that ends the process where memory is out: once, as the file that `FULL` names is then there."""

    def forward(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        file = Path(os.environ["FULL"])
        if not file.exists():
            file.touch()
            print("CUDA error (launch_template.h:199): out of memory", file=sys.stderr, flush=True)
            os._exit(1)
        return super().forward(query, *args, **kwargs)


@register_backend("FULL")
class FullBackend(TorchBackend):
    name = "FULL"
    impl_cls = FullImpl
