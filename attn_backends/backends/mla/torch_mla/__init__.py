"""The files of TORCH_MLA."""
