"""Which tokens of a batch stand for which embeddings of images or sounds: carried for the model, not for attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attn_backends.batch.page_table import IntArray


class IndexMap(NamedTuple):
    """Tokens of one modality: token `dest[i]` gets embedding `src[i]`. Both rise."""

    src: IntArray  # [n] of the modality's embeddings; a batch has those of all its rows, one row after the other
    dest: IntArray  # [n] of the row's new tokens, or of the batch's
    num_embeddings: int  # in all, used or not: the next row's begin behind them


@dataclass(frozen=True, eq=False)
class PlaceholderMaps(Mapping[str, IndexMap]):
    """A batch's maps by modality, which nothing changes."""

    entries: tuple[tuple[str, IndexMap], ...] = ()

    def __getitem__(self, modality: str) -> IndexMap:
        return dict(self.entries)[modality]

    def __iter__(self) -> Iterator[str]:
        return (modality for modality, _ in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    __hash__ = object.__hash__


NO_PLACEHOLDERS = PlaceholderMaps()


def join_maps(of_rows: Sequence[Mapping[str, IndexMap]], first_tokens: Sequence[int] | IntArray) -> PlaceholderMaps:
    """The maps of a batch, from those of its rows and where each row's new tokens begin.

    >>> image = IndexMap(np.array([0, 1]), np.array([2, 3]), 2)
    >>> join_maps([{"image": image}, {}, {"image": image}], [0, 5, 6])["image"].dest.tolist()
    [2, 3, 8, 9]
    """
    if all(maps is NO_PLACEHOLDERS for maps in of_rows):  # most batches: it runs in every step
        return NO_PLACEHOLDERS
    joined: dict[str, IndexMap] = {}
    for maps, first in zip(of_rows, first_tokens, strict=True):
        for modality, more in maps.items():
            src, dest, count = joined.get(modality, IndexMap(_NONE, _NONE, 0))
            src, dest = np.concatenate([src, more.src + count]), np.concatenate([dest, more.dest + first])
            joined[modality] = IndexMap(src.astype(np.int32), dest.astype(np.int32), count + more.num_embeddings)
    return PlaceholderMaps((*joined.items(),)) if joined else NO_PLACEHOLDERS


def cut_maps(maps: PlaceholderMaps, first: int, stop: int) -> PlaceholderMaps:
    """The maps of tokens `first` to `stop`, counted from `first`. Embeddings are counted as in the whole."""
    found = []
    for modality, (src, dest, count) in maps.entries:
        inside = (dest >= first) & (dest < stop)
        if inside.any():
            found.append((modality, IndexMap(src[inside], dest[inside] - first, count)))
    return PlaceholderMaps((*found,)) if maps else maps


def check_maps(maps: Mapping[str, IndexMap], num_tokens: int) -> None:
    """A row's maps name its own tokens and embeddings.

    Raises:
        ValueError: they do not.
    """
    for modality, (src, dest, count) in maps.items():
        src, dest = np.asarray(src), np.asarray(dest)
        in_range = all(0 <= int(of.min(initial=0)) <= int(of.max(initial=0)) < max(most, 1)
                       for of, most in ((src, count), (dest, num_tokens)))  # fmt: skip
        if src.shape != dest.shape or src.ndim != 1 or not in_range:
            raise ValueError(
                f"placeholders of {modality!r} map embeddings {src.tolist()} of {count} to tokens {dest.tolist()} of "
                f"{num_tokens}: as many of each, within these"
            )


_NONE: IntArray = np.zeros(0, np.int32)
