"""TORCH_MLA: plain torch over the latent cache, on any device."""
