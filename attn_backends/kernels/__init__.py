"""What several backends' kernels share, and no attention: launches, split work, fp8, merged states, warm-up."""
