"""Forms that weigh every pair of a query and a key: at once, in fused kernels, in blocks."""
