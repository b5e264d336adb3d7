"""What stands for SGLang, where it is not here itself, before any module of the adapter is imported."""

from __future__ import annotations

from tests.helpers import sglang_stand_in

sglang_stand_in.install()
