"""Experts in the bytes of their checkpoint, by the library humming-kernels: the way, sizes, weights, kernels."""
