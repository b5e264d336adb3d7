"""Importing this fails where nobody brings FlashMLA's kernels, and says why: FLASHMLA is importable exactly then."""

from attn_backends.backends.mla.flashmla.library import load_kernels

load_kernels()
