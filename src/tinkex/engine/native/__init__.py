"""The decode step on the CPU as one call of C: the fast path of `ContinuousBatch` for dense fp32 models.

`build` compiles the library and `step` calls it. Without a C compiler nothing here is used.
`tests/engine/test_compiled.py` compares the C step with the decoder.
"""
