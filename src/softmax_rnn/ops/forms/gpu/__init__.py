"""The Triton kernels of pairs and chunks."""
