"""FLASHMLA: FlashMLA's kernels over the latent cache, in both generations."""
