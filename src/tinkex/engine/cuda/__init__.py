"""Triton kernels and captured graphs for CUDA in bf16, behind `cuda_backend.CudaBackend`.

Every kernel has an oracle in plain torch; README.md lists both. Importing the modules here needs Triton.
"""
