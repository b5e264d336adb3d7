"""Prefills whose keys are split at lengths that a CPU can attend to, by emulated multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from attn_backends.backends.triton import metadata, plans, rules
from attn_backends.kernels.prefill import split_tiles, splits, tile_splits
from attn_backends.machine import pretend_multiprocessors


@contextmanager
def splitting(
    num_sms: int, least_keys: int = 64, target: int | None = None, whole: float | None = None, by_half: bool = False,
    split_blocks: int = 0,
) -> Iterator[None]:  # fmt: skip
    """All prefills that can be are split for so many multiprocessors, of splits of `least_keys` keys or more.

    Args:
        target: None: as many splits as there can be.
        whole: the part of the tiles that come first and are whole: all of them, with 1. None: any may be split.
        split_blocks: of splits by the lengths of tiles; 0: a row's tiles are split as often as each other.
        by_half: the kernel for Hopper takes tiles of half the size, where it has them, and never else.
    """

    def wanted(load: object, heads: int, num_programs: int, *_: object) -> int:
        return splits.most_tile_splits(num_programs) if target is None else target

    def behind(load: splits.TileLoad, heads: int, num_programs: int, *_: object) -> tuple[int, int]:
        assert whole is not None
        return int(whole * int(load.tiles.sum())), wanted(load, heads, num_programs) if whole < 1 else 0

    changes: dict[str, object] = {"split_target": lambda *given: (wanted(*given), 0.0)}
    if whole is not None:
        changes = {
            "split_target": lambda *_: (0, 0.0), "last_wave": behind, "is_faster_in_order": lambda *_: True,
            "faster_by_length": lambda *_: 1.0, "reads_alike": lambda *_: True,
        }  # fmt: skip
    if split_blocks:

        def by_tile(_load: object, _keys: object, heads: int, num_programs: int, *_: object) -> object:
            return tile_splits.TileSplits(split_blocks, splits.most_tile_splits(num_programs) // heads, 0.0)

        changes = {"split_target": lambda *_: (0, 0.0), "split_by_tile": by_tile}
    with (
        pretend_multiprocessors(num_sms),
        mock.patch.object(split_tiles, "LEAST_KEYS", least_keys),
        mock.patch.multiple(rules, **changes),
        mock.patch.object(metadata, "faster_hopper_tile", return_value=None),
        mock.patch.object(plans, "_taken", lambda spec, plan, *_: float((plan.tile is None) is by_half)),
    ):
        yield
