"""Prompts of different lengths that the generation benchmarks share."""

from __future__ import annotations

TOPICS = [
    "the sea", "how bread is made", "the history of the bicycle", "why leaves fall", "chess", "a small town in winter",
    "the moon", "learning to swim", "old maps", "the sound of rain", "coffee", "a train journey", "stars", "gardens",
    "the colour blue", "a lost letter",
]  # fmt: skip


def prompts(count: int) -> list[str]:
    """Different lengths: some 8 to 60 tokens."""
    return [f"Here is a short text about {topic}. " + "It begins slowly. " * (i % 5) for i, topic in
            zip(range(count), TOPICS, strict=False)]  # fmt: skip
