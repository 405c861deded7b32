"""The decoding step on the CPU as one call of compiled code: the fast path of `sampler.Batch`.

`build` makes the library, `structs` mirrors its structs, `step` fills them. Nothing here is used where there
is no C compiler, and a test holds the compiled step to the decoder's own numbers.
"""
