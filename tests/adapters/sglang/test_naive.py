"""A third party's backend serves in SGLang without a line about it: the example plugin's.

Over what stands for SGLang here; `make test-engines` runs the same over SGLang itself.
"""

from __future__ import annotations

import random

import pytest

from attn_backends.adapters.sglang import plugin
from attn_backends.interface.capabilities import Unsupported
from tests.adapters.sglang.test_steps import random_steps
from tests.helpers.naive_plugin import naive  # noqa: F401 (registers it)
from tests.helpers.sglang_engine import Engine, Kind, Shape


@pytest.mark.parametrize("seed", range(2))
def test_it_serves(seed: int) -> None:
    """Steps of every mode, against the reference."""
    engine = Engine("NAIVE", Shape(kinds=(Kind(), Kind(scaling=0.5))), seed)
    made = plugin.make_backend("NAIVE", engine.runner)
    assert [each.pools[0].plans.backend.get_name() for each in (made, engine.attention)] == ["NAIVE"] * 2
    random_steps(engine, random.Random(seed), 10)


def test_its_refusals_are_sglangs_users_too() -> None:
    with pytest.raises(Unsupported, match=r"NAIVE cannot serve.*\n.*window: got"):
        Engine("NAIVE", Shape(kinds=(Kind(window=5),)))
