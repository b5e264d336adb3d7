"""All providers."""

from __future__ import annotations

from collections.abc import Sequence

from attn_backends.backends.flash_attn.fa2 import FlashAttn2, VllmFa2
from attn_backends.backends.flash_attn.fa3 import FlashAttnInterface, VllmFa3
from attn_backends.backends.flash_attn.fa4 import FlashAttn4
from attn_backends.backends.flash_attn.provider import Provider

# Best first, as measured; the last has not been timed, and does not split keys.
PROVIDERS: Sequence[Provider] = (VllmFa3(), FlashAttnInterface(), FlashAttn2(), VllmFa2(), FlashAttn4())
