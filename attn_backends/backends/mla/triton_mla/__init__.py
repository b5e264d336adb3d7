"""TRITON_MLA: our own kernels over the latent cache."""
