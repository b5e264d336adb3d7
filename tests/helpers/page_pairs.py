"""Pairs of pages to copy, at random."""

from __future__ import annotations

from random import Random


def pairs_at_random(random: Random, num_pages: int) -> list[tuple[int, int]]:
    """Every destination once; sources any, so that there are chains, circles, pages to themselves and sources twice."""
    destinations = random.sample(range(num_pages), random.randint(1, num_pages))
    return [(random.randrange(num_pages), destination) for destination in destinations]
