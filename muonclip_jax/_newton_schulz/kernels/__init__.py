"""Symmetric products at half the arithmetic: Pallas kernels for GPU and TPU."""
