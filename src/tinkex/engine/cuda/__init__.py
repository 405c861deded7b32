"""Triton kernels and captured graphs for CUDA in bf16: see README.md. Importing the modules needs Triton."""
