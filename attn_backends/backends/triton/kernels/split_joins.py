"""How the programs that have the splits of a row meet, in the launch that made them: some stay, and share the work of
combining.

There is no second launch. Of what a program would wait for, all has begun: so it ends, whether or not any other program
runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

JOIN_WORDS = tl.constexpr(4)  # of a row's splits, a head and a tile: the next two, and ARRIVED of two launches
HAVE_BEGUN, LAUNCHES, ARRIVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_STAYING = tl.constexpr(1 << 16)  # times as many as stay, above as many as have arrived


@triton.jit
def arrive(words, num_splits, launches, stays):  # type: ignore[no-untyped-def]
    """Count the program among those that have their partial result of a row stored, and let it wait for the others if
    it stays.

    It may only stay if all others have begun: these end whether or not any other program runs, as none of them waits
    before it has arrived. The last one goes on for all of them if nobody stays.

    `words` are HAVE_BEGUN, 0 between launches; LAUNCHES, which only has to change; and two of ARRIVED, of this launch
    and of the one before, as those who stay may read theirs until the launch ends. The one that LAUNCHES points to is 0
    between launches.

    Returns:
        which part of the columns this program combines, and of how many; 0 parts: it combines none.
    """
    arrived = words + ARRIVED + launches % 2
    now = tl.atomic_add(arrived, 1 + stays * _STAYING, sem="acq_rel")
    part = now // _STAYING
    now += 1 + stays * _STAYING
    is_last = now % _STAYING == num_splits
    if is_last:
        tl.store(words + HAVE_BEGUN, 0)
        tl.store(words + ARRIVED + (launches + 1) % 2, 0)
        tl.store(words + LAUNCHES, launches + 1)
    while (stays > 0) & (now % _STAYING < num_splits):
        now = tl.atomic_add(arrived, 0, sem="acquire")
    num_parts = tl.where(stays > 0, now // _STAYING, 0)
    return part, tl.where(is_last & (now < _STAYING), 1, num_parts)
