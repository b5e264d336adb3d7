"""TRITON: our own kernels over the page table, with no plan on the host and nothing to install beyond torch."""
