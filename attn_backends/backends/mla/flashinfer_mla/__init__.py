"""FLASHINFER_MLA: FlashInfer's MLA wrapper over the latent cache, planned on the host."""
