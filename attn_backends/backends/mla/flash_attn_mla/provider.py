"""FlashAttention 3, imported: the build that is here. Importing this fails where none is."""

from attn_backends.backends.mla.flash_attn_mla.library import load

KERNELS = load()
