"""Quantise a matrix as each kind of file holds it, written code by code: what a reader must undo.

A packer takes [O, I] and returns the tensors by what they add to the module's name, and the values that they
stand for. Nothing here is shared with our own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 = np.array(_E2M1 + [-x for x in _E2M1], np.float32)


def fp8_blocks(w: Tensor, exponents: bool = False) -> Packed:
    rows, columns = w.shape
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.01 + 0.002
    if exponents:
        scale = scale.log2().round().exp2()
    codes, values = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(w.shape)
    for i in range(rows):
        for j in range(0, columns, 128):
            here = slice(j, j + 128)
            codes[i, here] = (w[i, here] / scale[i // 128, j // 128]).clamp(-448, 448).to(codes.dtype)
            values[i, here] = codes[i, here].float() * scale[i // 128, j // 128]
    stored = scale.to(torch.float8_e8m0fnu) if exponents else scale
    return {".weight": codes, ".weight_scale_inv": stored}, values


def fp8_channels(w: Tensor) -> Packed:
    scale = w.abs().amax(1, keepdim=True) / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    beside = {".weight_scale": scale, ".input_scale_ub": torch.ones(1)}
    return {".weight": codes, **beside}, codes.float() * scale


def fp8_tensor(w: Tensor) -> Packed:
    scale = w.abs().amax() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(())}, codes.float() * scale


def mxfp8(w: Tensor) -> Packed:
    exponent = torch.randint(117, 121, (w.shape[0], w.shape[1] // 32), dtype=torch.uint8)
    scale = torch.pow(2.0, exponent.float() - 127).repeat_interleave(32, 1)
    codes = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": exponent}, codes.float() * scale


def int8_channels(w: Tensor) -> Packed:
    scale = w.abs().amax(1, keepdim=True) / 127
    codes = (w / scale).round().to(torch.int8)
    return {
        ".weight": codes,
        ".weight_scale": scale.to(torch.bfloat16),
    }, codes.float() * scale.bfloat16().float()


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None] - table).argmin(-1)


def _bytes(codes: np.ndarray, high_first: bool = False) -> Tensor:
    even, odd = codes[:, 0::2], codes[:, 1::2]
    return torch.tensor(even * 16 + odd if high_first else odd * 16 + even, dtype=torch.uint8)


def _groups(scale: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(scale, columns // scale.shape[1], axis=1)


def nvfp4(w: Tensor, *, modelopt: bool = False) -> Packed:
    x, whole = w.numpy(), 0.013
    scale = torch.rand(w.shape[0], w.shape[1] // 16).mul(20).add(1).to(torch.float8_e4m3fn)
    wide = _groups(scale.float().numpy(), w.shape[1]) * np.float32(whole)
    codes = _nearest(x / wide, FP4)
    values = torch.tensor(FP4[codes] * wide)
    if modelopt:
        beside = {
            ".weight_scale": scale,
            ".weight_scale_2": torch.tensor(whole),
            ".input_scale": torch.ones(()),
        }
        return {".weight": _bytes(codes), **beside}, values
    beside = {".weight_scale": scale, ".weight_global_scale": torch.tensor([1 / whole])}
    return {".weight_packed": _bytes(codes), **beside, ".input_global_scale": torch.ones(1)}, values


def mxfp4(w: Tensor) -> Packed:
    """As compressed-tensors writes it; gpt-oss has names and shapes of its own."""
    exponent = np.random.default_rng(0).integers(124, 128, (w.shape[0], w.shape[1] // 32), dtype=np.uint8)
    wide = _groups(2.0 ** (exponent.astype(np.float32) - 127), w.shape[1])
    codes = _nearest(w.numpy() / wide, FP4)
    beside = {".weight_scale": torch.tensor(exponent)}
    return {".weight_packed": _bytes(codes), **beside}, torch.tensor(FP4[codes] * wide).float()


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes in int32 words, the first in the lowest bits."""
    per, (rows, columns) = 32 // bits, codes.shape
    words = np.zeros((rows, -(-columns // per)), np.uint32)
    for j in range(columns):
        words[:, j // per] |= codes[:, j].astype(np.uint32) << np.uint32(bits * (j % per))
    return words.view(np.int32)


def pack_quantized(w: Tensor, *, bits: int = 4, symmetric: bool = True, shuffled: bool = False) -> Packed:
    rng, size, (rows, columns) = np.random.default_rng(0), 32, w.shape
    half, groups = 2 ** (bits - 1), columns // size
    group = np.arange(columns) // size
    if shuffled:
        rng.shuffle(group)
    scale = torch.rand(rows, groups).mul(0.05).add(0.03).to(torch.bfloat16)
    zero = np.zeros((rows, groups), int) if symmetric else rng.integers(-half, half, (rows, groups))
    wide = scale.float().numpy()[:, group]
    codes = np.clip(np.round(w.numpy() / wide) + zero[:, group], -half, half - 1).astype(int)
    tensors = {
        ".weight_packed": torch.tensor(_words(codes + half, bits)),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = torch.tensor(_words((zero + half).T, bits).T.copy())
    if shuffled:
        tensors[".weight_g_idx"] = torch.tensor(group, dtype=torch.int32)
    return tensors, torch.tensor((codes - zero[:, group]) * wide).float()


def gptq(w: Tensor, *, bits: int = 4, version: int = 1, shuffled: bool = False) -> Packed:
    rng, size, (rows, columns) = np.random.default_rng(0), 32, w.shape
    group = np.arange(columns) // size
    if shuffled:
        rng.shuffle(group)
    scale = torch.rand(columns // size, rows).mul(0.05).add(0.03).half()
    zero = rng.integers(1, 2**bits, (columns // size, rows))
    wide, wide_zero = scale.float().numpy()[group].T, zero[group].T
    codes = np.clip(np.round(w.numpy() / wide) + wide_zero, 0, 2**bits - 1).astype(int)
    tensors = {
        ".qweight": torch.tensor(_words(codes, bits).T.copy()),
        ".qzeros": torch.tensor(_words(zero - 1 if version == 1 else zero, bits)),
        ".scales": scale,
        ".g_idx": torch.tensor(group, dtype=torch.int32),
    }
    return tensors, torch.tensor((codes - wide_zero) * wide).float()


def awq(w: Tensor) -> Packed:
    rng, size, (rows, columns) = np.random.default_rng(0), 32, w.shape
    scale = torch.rand(columns // size, rows).mul(0.05).add(0.03).half()
    zero = rng.integers(0, 16, (columns // size, rows))
    group = np.arange(columns) // size
    wide, wide_zero = scale.float().numpy()[group].T, zero[group].T
    codes = np.clip(np.round(w.numpy() / wide) + wide_zero, 0, 15).astype(int)

    def words(by_output: np.ndarray) -> Tensor:
        eights = by_output.reshape(len(by_output), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return torch.tensor(_words(eights.reshape(by_output.shape), 4))

    tensors = {".qweight": words(codes.T), ".qzeros": words(zero), ".scales": scale}
    return tensors, torch.tensor((codes - wide_zero) * wide).float()


def bitsandbytes(w: Tensor, *, nested: bool = False) -> Packed:
    rng, size, flat = np.random.default_rng(0), 64, w.numpy().reshape(-1)
    table = np.sort(np.concatenate([[-1.0, 0.0, 1.0], rng.uniform(-1, 1, 13)])).astype(np.float32)
    blocks = -(-len(flat) // size)
    absmax = np.array([np.abs(flat[i * size : (i + 1) * size]).max() for i in range(blocks)], np.float32)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": size,
        "dtype": "float16",
        "shape": list(w.shape),
    }
    tensors = {".weight.quant_map": torch.tensor(table)}
    if nested:
        outer = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        offset, large = float(absmax.mean()), np.float32(np.abs(absmax - absmax.mean()).max())
        byte = _nearest((absmax - np.float32(offset)) / large, outer)
        absmax = outer[byte] * large + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors[".weight.absmax"] = torch.tensor(byte, dtype=torch.uint8)
        tensors[".weight.nested_absmax"] = torch.full((-(-blocks // 256),), float(large))
        tensors[".weight.nested_quant_map"] = torch.tensor(outer)
    else:
        tensors[".weight.absmax"] = torch.tensor(absmax)
    wide = np.repeat(absmax, size)[: len(flat)]
    codes = _nearest(flat / wide, table)
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    tensors[".weight"] = _bytes(codes[None], high_first=True).view(-1, 1)
    return tensors, torch.tensor(table[codes] * wide).view(w.shape)


def bitsandbytes_int8(w: Tensor) -> Packed:
    largest = w.abs().amax(1)
    codes = (w / largest[:, None] * 127).round().to(torch.int8)
    beside = {".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {".weight": codes, **beside}, codes.float() * largest[:, None] / 127


# What config.json says of each, and its packer.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8 blocks ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        lambda w: fp8_blocks(w, exponents=True),
    ),
    "fp8 channels": ({"quant_method": "fbgemm_fp8"}, fp8_channels),
    "fp8 tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "mxfp8": ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, mxfp8),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8_channels),
    "nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, nvfp4),
    "nvfp4 modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda w: nvfp4(w, modelopt=True),
    ),
    "mxfp4": ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, mxfp4),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, pack_quantized),
    "int4 zeros": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        lambda w: pack_quantized(w, symmetric=False),
    ),
    "int4 shuffled": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        lambda w: pack_quantized(w, shuffled=True),
    ),
    "int8 packed": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        lambda w: pack_quantized(w, bits=8, symmetric=False),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, version=2),
    ),
    "gptq shuffled": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, shuffled=True)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, bits=8)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes),
    "nf4 nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda w: bitsandbytes(w, nested=True),
    ),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8),
}
