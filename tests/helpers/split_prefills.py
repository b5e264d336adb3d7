"""Prefills whose keys are split at lengths that a CPU can attend to, by emulated multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from attn_backends.backends.triton import rules
from attn_backends.kernels.prefill import splits
from attn_backends.machine import pretend_multiprocessors


@contextmanager
def splitting(num_sms: int, least_keys: int = 64, target: int | None = None) -> Iterator[None]:
    """All prefills that can be are split for so many multiprocessors, of splits of `least_keys` keys or more.

    Args:
        target: None: as many splits as there can be.
    """

    def wanted(load: object, heads: int, num_programs: int, *_: object) -> int:
        return splits.most_tile_splits(num_programs) if target is None else target

    with (
        pretend_multiprocessors(num_sms),
        mock.patch.object(splits, "LEAST_KEYS", least_keys),
        mock.patch.object(rules, "split_target", wanted),
    ):
        yield
