"""Errors as results have them."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """An error in one line, for a contender that drops out."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
