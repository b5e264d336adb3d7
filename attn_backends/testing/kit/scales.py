"""Scales over caches of any dtype: a cached value times its scale is the real one, and new keys are as they came."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import CROSS, ENCODER, FEATURES, Feature, feature
from attn_backends.testing.kit.base import WHOLE_PROMPTS, KitBase

SHAPES = ("mixed_small", "small_decode", "spec_verify", WHOLE_PROMPTS)
SHARED_PAGES = 2
IN_EVERY_DTYPE = ("plain", "soft_cap_and_sinks", "alibi_and_window")


def draw_scales(numbers: Random) -> tuple[float, float]:
    """Scales of keys and of values, one below 1 and one above, so that neither serves for the other."""
    drawn = [numbers.uniform(0.2, 0.6), numbers.uniform(1.7, 4.0)]
    numbers.shuffle(drawn)
    return drawn[0], drawn[1]


def scale_pairs(name: str) -> tuple[tuple[float, float], ...]:
    """(k_scale, v_scale) of keys alone, of values alone and of both; the same name gives the same ones."""
    k_scale, v_scale = draw_scales(Random(name))
    return (k_scale, 1.0), (1.0, v_scale), (k_scale, v_scale)


class Scales(KitBase):
    @pytest.mark.parametrize("name", [f.name for f in (*FEATURES, CROSS)])
    def test_scales_over_float_caches(self, name: str) -> None:
        """With every feature; a scale that is dropped where the cache is written or where it is read shows."""
        self.check_scales(name, self.dtype)

    @pytest.mark.parametrize("name", IN_EVERY_DTYPE)
    def test_scales_in_every_dtype(self, name: str, dtype: torch.dtype) -> None:
        """What other dtypes have of their own: they choose kernels, and are rounded where they are written."""
        if dtype is not self.dtype:
            self.check_scales(name, dtype)

    def check_scales(self, name: str, dtype: torch.dtype) -> None:
        for _, spec in self.served([feature(name)], dtype=dtype):
            for nth, (k_scale, v_scale) in enumerate(scale_pairs(name)):
                shapes = SHAPES[nth % 2 :: 2] if nth < 2 else SHAPES[:2]
                self.check(spec, shapes, f"{name}, scales {k_scale} and {v_scale},", k_scale=k_scale, v_scale=v_scale)

    @pytest.mark.parametrize("asked", [feature("plain"), feature("sinks"), ENCODER], ids=lambda asked: asked.name)
    def test_scales_are_of_the_cache_alone(self, asked: Feature) -> None:
        """Keys that no cache holds, as in a profile run and in an encoder, have none."""
        for _, spec in self.served([asked]):
            for k_scale, v_scale in scale_pairs(asked.name):
                self.check(spec, [WHOLE_PROMPTS], "without a cache", cached=False, k_scale=k_scale, v_scale=v_scale)

    @pytest.mark.parametrize("name", ["plain", "soft_cap", "sinks", "soft_cap_and_sinks", "window_15", "alibi"])
    def test_scales_with_a_shared_prefix(self, name: str) -> None:
        """A prefix that is attended once for all rows is read with the same scales as what joins it."""
        prefix = SHARED_PAGES * self.page_size
        shape = BatchShape(seq_lens=tuple(prefix + n for n in (1, 9, 20)), query_lens=(1, 1, 12))
        for _, spec in self.served([feature(name)]):
            for k_scale, v_scale in scale_pairs(name):
                batch = self.make_batch(spec, shape, shared_prefix_len=prefix, k_scale=k_scale, v_scale=v_scale)
                what = f"{name}, shared prefix, scales {k_scale}, {v_scale}"
                self.check_batch(batch, what, common_prefix_len=prefix)
