"""Which tokens of a batch stand for which embeddings of images or sounds: carried for the model, not for attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attn_backends.batch.page_table import IntArray


class IndexMap(NamedTuple):
    """Tokens of one modality: token `dest[i]` gets embedding `src[i]`. Both rise."""

    src: IntArray  # [n] of the modality's embeddings; a batch has those of all its rows, one row after the other
    dest: IntArray  # [n] of the row's new tokens, or of the batch's
    num_embeddings: int  # in all, used or not: the next row's begin behind them


PlaceholderMaps = Mapping[str, IndexMap]  # by modality


def join_maps(of_rows: Sequence[PlaceholderMaps], first_tokens: Sequence[int] | IntArray) -> dict[str, IndexMap]:
    """The maps of a batch, from those of its rows and where each row's new tokens begin.

    >>> image = IndexMap(np.array([0, 1]), np.array([2, 3]), 2)
    >>> join_maps([{"image": image}, {}, {"image": image}], [0, 5, 6])["image"].dest.tolist()
    [2, 3, 8, 9]
    """
    joined: dict[str, IndexMap] = {}
    for maps, first in zip(of_rows, first_tokens, strict=True):
        for modality, more in maps.items():
            src, dest, count = joined.get(modality, IndexMap(_NONE, _NONE, 0))
            src, dest = np.concatenate([src, more.src + count]), np.concatenate([dest, more.dest + first])
            joined[modality] = IndexMap(src.astype(np.int32), dest.astype(np.int32), count + more.num_embeddings)
    return joined


def cut_maps(maps: PlaceholderMaps, first: int, stop: int) -> dict[str, IndexMap]:
    """The maps of tokens `first` to `stop`, counted from `first`. Embeddings are counted as in the whole."""
    found = {}
    for modality, (src, dest, count) in maps.items():
        inside = (dest >= first) & (dest < stop)
        if inside.any():
            found[modality] = IndexMap(src[inside], dest[inside] - first, count)
    return found


def check_maps(maps: PlaceholderMaps, num_tokens: int) -> None:
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
