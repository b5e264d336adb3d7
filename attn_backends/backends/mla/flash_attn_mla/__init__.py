"""FLASH_ATTN_MLA: FlashAttention 3 over the latent cache."""
