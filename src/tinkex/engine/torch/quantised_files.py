"""Read quantised safetensors files: find the tensors of each weight, and convert them to one form.

A weight's scales may lie in another file, so names are grouped first, and then read one weight at a time.
Every format is known by the names and types of its tensors; config.json decides only where those leave a
choice. Modules that were left in a plain dtype pass through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkex.engine.torch.quantised import FP4, QuantisedWeight
from tinkex.errors import InvalidInputError

LOADABLE = (
    "what loads: safetensors in float32, bfloat16 or float16, or quantised as fp8, mxfp8, mxfp4, nvfp4, int8 "
    "or int4 (compressed-tensors, modelopt, fbgemm), bitsandbytes (nf4, fp4, int8), AWQ (gemm) or GPTQ (4 "
    "and 8 bits), and .gguf files, quantised ones too"
)
_MAPPED = 256 << 20  # bytes read of a mapped file before it is mapped again, to drop its pages from memory
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "modelopt", "bitsandbytes", "awq", "gptq")
_FORMATS = ("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized",
            "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")  # fmt: skip
# Of activations and of the KV cache, which are not quantised here.
_UNUSED = re.compile(
    r"\.(input_scale(_ub)?|input_global_scale|input_zero_point|activation_scale|output_scale|[qkv]_scale"
    r"|weight_format)$"
)
# The ending of a weight's codes, what takes its place in the weight's name, and what may stand beside it.
_CODES = (
    (".weight_packed", ".weight", (".weight_scale", ".weight_shape", ".weight_zero_point",
                                   ".weight_global_scale", ".weight_g_idx")),
    (".qweight", ".weight", (".qzeros", ".scales", ".g_idx")),
    ("_blocks", "", ("_scales",)),
)  # fmt: skip
_BESIDE = ("_scale_inv", "_scale", "_scale_2", "_zero_point", ".absmax", ".quant_map", ".nested_absmax",
           ".nested_quant_map", ".quant_state.bitsandbytes__nf4",
           ".quant_state.bitsandbytes__fp4")  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where eight neighbouring channels lie in a word, from its low bits


def quantisation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's quantization_config, which may lie in its text_config; empty if there is none."""
    nested = fields.get("text_config") or {}
    return fields.get("quantization_config") or nested.get("quantization_config") or {}


def method_name(scheme: Mapping[str, Any]) -> str:
    """The scheme in a word, as config.json names it."""
    method = scheme.get("quant_method") or scheme.get("quant_type") or "an unnamed scheme"
    return str(scheme.get("packing_format", "")).removeprefix("auto_round:auto_") or str(method)


def check_scheme(directory: Path, fields: Mapping[str, Any]) -> None:
    """Refuse a scheme that is not read."""
    scheme = quantisation(fields)
    if not scheme:
        return
    method, problem = method_name(scheme), None
    if method not in _METHODS:
        problem = method
    elif method == "compressed-tensors" and scheme.get("format", "dense") not in _FORMATS:
        problem = f"compressed-tensors, format {scheme['format']!r}"
    elif method == "awq" and str(scheme.get("version", "gemm")).lower() != "gemm":
        problem = f"awq, version {scheme['version']!r}"
    elif method == "gptq" and scheme.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        problem = f"gptq, checkpoint_format {scheme['checkpoint_format']!r}"
    elif method in ("awq", "gptq") and scheme.get("bits", 4) not in ((4, 8) if method == "gptq" else (4,)):
        problem = f"{method} with {scheme['bits']} bits"
    if problem:
        raise InvalidInputError(
            f"{directory} is quantised ({problem}, by its config.json), which is not read; {LOADABLE}"
        )


class QuantisedFiles:
    """The tensors of a directory's safetensors files, each weight with what belongs to it."""

    def __init__(self, files: list[Path], scheme: Mapping[str, Any]) -> None:
        self._paths, self._scheme = files, scheme
        self._names: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._mapped = 0  # bytes read through the mappings

    def tensors(self) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
        """Every weight under the name that it has in a plain file, file by file."""
        for path in self._paths:
            self._map(path)
            self._names |= dict.fromkeys(self._open[path].keys(), path)
        groups = {name: found for name in self._names if (found := self._group(name))}
        used = {name for _, beside in groups.values() for name in beside.values()}
        for name in self._names:
            if name in groups:
                target, beside = groups[name]
                yield target, self._read(name, target, beside)
            elif name not in used and not (groups and _UNUSED.search(name)):
                tensor = self._get(name)
                if tensor.dtype not in _PLAIN and name.endswith((".weight", ".bias")):
                    kind = str(tensor.dtype).removeprefix("torch.")
                    raise InvalidInputError(
                        f"{self._names[name]} is quantised ({name} is {kind}) without scales beside it; "
                        f"{LOADABLE}"
                    )
                yield name, tensor
        self._open.clear()

    def _map(self, path: Path) -> None:
        """Map a file; the mapping before it, and its pages in memory, end with the tensors of it in use."""
        try:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        except SafetensorError as error:
            raise InvalidInputError(f"{path} is corrupted or cut short: {error}; fetch it again") from error
        self._mapped = 0

    def _get(self, name: str) -> Tensor:
        path = self._names[name]
        if self._mapped > _MAPPED:
            self._map(path)
        try:
            tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise InvalidInputError(f"{path} is corrupted or cut short: {error}; fetch it again") from error
        self._mapped += tensor.nbytes
        return tensor

    def _group(self, name: str) -> tuple[str, dict[str, str]] | None:
        """The weight that `name` holds the codes of, and the tensors beside it by their endings."""
        for ending, replaced, others in _CODES:
            if name.endswith(ending):
                stem = name.removesuffix(ending)
                beside = {other: stem + other for other in others if stem + other in self._names}
                return (stem + replaced, beside) if beside else None
        beside = {ending: name + ending for ending in _BESIDE if name + ending in self._names}
        if name.endswith(".weight") and (columns := name.removesuffix("weight") + "SCB") in self._names:
            beside["SCB"] = columns
        if beside and ".absmax" not in beside and self._is_plain(name):
            return None
        return (name, beside) if beside else None

    def _is_plain(self, name: str) -> bool:
        return self._open[self._names[name]].get_slice(name).get_dtype() in ("F32", "BF16", "F16", "F64")

    def _read(self, name: str, target: str, beside: dict[str, str]) -> Tensor | QuantisedWeight:
        codes = self._get(name)
        parts = {ending: self._get(other) for ending, other in beside.items()}
        try:
            if name.endswith("_blocks"):
                codes, scale = codes.flatten(-2), _floats(parts["_scales"])  # […, out, in/32, 16] bytes
                return QuantisedWeight(codes, scale, (1, 32), torch.tensor(FP4), transposed=True)
            if ".absmax" in parts:
                return _bitsandbytes(codes, parts)
            if "SCB" in parts:
                return QuantisedWeight(codes, parts["SCB"].view(-1, 1), (1, codes.shape[1]), factor=1 / 127)
            if name.endswith(".qweight"):
                return _awq(codes, parts) if self._is_awq(codes, parts) else self._gptq(codes, parts)
            if name.endswith(".weight_packed"):
                packed = {ending.removeprefix(".weight"): part for ending, part in parts.items()}
                return _pack_quantized(codes, packed) if codes.dtype == torch.int32 else _fp4(codes, packed)
            if codes.dtype == torch.uint8:
                return _fp4(codes, parts)
            return self._scaled(codes, parts)
        except (KeyError, InvalidInputError, RuntimeError) as error:
            missing = f"has no {error.args[0]} beside it" if isinstance(error, KeyError) else str(error)
            raise InvalidInputError(f"{self._names[name]}: {target} is quantised, and {missing}") from error

    def _is_awq(self, codes: Tensor, parts: Mapping[str, Tensor]) -> bool:
        if (method := method_name(self._scheme)) in ("awq", "gptq"):
            return method == "awq"
        return codes.shape[1] != parts[".scales"].shape[1]

    def _gptq(self, codes: Tensor, parts: Mapping[str, Tensor]) -> Tensor | QuantisedWeight:
        """Words of 4 or 8 codes, from the low bits, along the input; zeros along the output."""
        scale = parts[".scales"]
        bits = 32 * parts[".qzeros"].shape[1] // scale.shape[1]
        zero = _unpacked(parts[".qzeros"], bits)
        if self._scheme.get("checkpoint_format", "gptq") == "gptq":  # the first version stores zero - 1
            zero = (zero + 1) & (2**bits - 1)
        codes = codes.t().contiguous().view(torch.uint8)
        table = torch.arange(16.0) if bits == 4 else None
        columns = codes.shape[1] * (2 if bits == 4 else 1)
        return _by_group(codes, scale.t(), zero.t(), table, parts.get(".g_idx"), columns)

    def _scaled(self, codes: Tensor, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        """fp8 or int8, with a scale for the tensor, for each row, or for each block."""
        scale = _floats(parts["_scale_inv"] if "_scale_inv" in parts else parts["_scale"])
        if scale.numel() == 1 or scale.dim() == 1:
            scale = scale.reshape(-1, *(1 for _ in codes.shape[1:]))
        if codes.dim() == 3 and scale.dim() == 3:
            scale = scale.expand(len(codes), -1, -1)
        given = self._scheme.get("weight_block_size") or (128, 128)
        sizes = zip(codes.shape[-2:], scale.shape[-2:], given, strict=True)
        high, wide = (step if -(-n // step) == count or n % count else n // count for n, count, step in sizes)
        zero = parts.get("_zero_point")
        zero = None if zero is None else zero.view(scale.shape)
        return QuantisedWeight(codes, scale, (high, wide), zero=zero)


def _floats(scale: Tensor) -> Tensor:
    """Scales; a byte is an exponent, which bfloat16 holds exactly."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return (scale.view(torch.uint8).float() - 127).exp2().to(torch.bfloat16)
    return scale


def _fp4(codes: Tensor, parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """nvfp4 (a scale in fp8 for 16 values, and one for the tensor) and mxfp4 (an exponent for 32)."""
    scale, factor = _floats(parts["_scale"]), 1.0
    if "_global_scale" in parts:
        factor = 1 / float(parts["_global_scale"].reshape(-1)[0])
    elif "_scale_2" in parts:
        factor = float(parts["_scale_2"].reshape(-1)[0])
    block = (1, 2 * codes.shape[-1] // scale.shape[-1])
    return QuantisedWeight(codes, scale, block, torch.tensor(FP4), factor=factor)


def _pack_quantized(codes: Tensor, parts: Mapping[str, Tensor]) -> Tensor | QuantisedWeight:
    """Signed integers of 4 or 8 bits, stored plus 8 or 128, from the low bits; zeros along the output."""
    *stack, count, columns = parts["_shape"].tolist()
    bits, scale = 32 * codes.shape[-1] // columns, parts["_scale"]
    if bits not in (4, 8) or stack:
        raise InvalidInputError(f"it is packed in {bits} bits as {list(codes.shape)}; 4 and 8 bits are read")
    codes = codes.view(torch.uint8)[:, : columns * bits // 8]
    codes, table = (codes, torch.arange(-8.0, 8.0)) if bits == 4 else ((codes ^ 0x80).view(torch.int8), None)
    zero = parts.get("_zero_point")
    if zero is not None:
        zero = (_unpacked(zero.t().contiguous(), bits)[:, :count].to(torch.int16) - 2 ** (bits - 1)).t()
    return _by_group(codes, scale, zero, table, parts.get("_g_idx"), columns)


def _awq(codes: Tensor, parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Words of eight output channels in the order of `_AWQ_ORDER`, for each input."""
    codes, zero = (
        _unpacked(part, 4).unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1).t()
        for part in (codes, parts[".qzeros"])
    )
    scale = parts[".scales"].t().contiguous()
    block = (1, codes.shape[1] // scale.shape[1])
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return QuantisedWeight(packed, scale, block, torch.arange(16.0), zero.contiguous())


def _by_group(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor | None,
    groups: Tensor | None,
    columns: int,
) -> Tensor | QuantisedWeight:
    """Codes [O, …] and scales [O, groups]; `groups` gives each column's, where they are not in order."""
    wide = -(-columns // scale.shape[1])
    ordered = groups is None or torch.equal(groups.long(), torch.arange(columns) // wide)
    if not ordered:
        assert groups is not None
        scale, wide = scale[:, groups.long()], 1
        zero = None if zero is None else zero[:, groups.long()]
    zero = None if zero is None else zero.contiguous()
    weight = QuantisedWeight(codes, scale.contiguous(), (1, wide), table, zero)
    return weight if ordered else weight.dequantise()  # with a scale for each value it would not be small


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 8 bits in rows of int32 words, from the low bits, a byte each."""
    if bits not in (4, 8):
        raise InvalidInputError(f"it has {bits} bits; 4 and 8 are read")
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def _bitsandbytes(codes: Tensor, parts: Mapping[str, Tensor]) -> Tensor | QuantisedWeight:
    """nf4 or fp4: the even value in the high bits; scales in blocks of the flat weight, maybe in 8 bits."""
    state = next(part for ending, part in parts.items() if ending.startswith(".quant_state"))
    fields = json.loads(bytes(state.tolist()))
    scale, table, size = parts[".absmax"], parts[".quant_map"].float(), fields["blocksize"]
    if ".nested_absmax" in parts:
        outer = parts[".nested_absmax"].repeat_interleave(fields["nested_blocksize"])[: scale.numel()]
        scale = parts[".nested_quant_map"][scale.long()] * outer + fields["nested_offset"]
    codes = codes.contiguous().view(torch.uint8).view(-1)
    codes = codes >> 4 | codes << 4
    count, columns = fields["shape"]
    if columns % size == 0:
        return QuantisedWeight(codes.view(count, -1), scale.view(count, -1), (1, size), table)
    flat = QuantisedWeight(codes[None], scale.view(1, -1), (1, size), table)
    return flat.dequantise().view(-1)[: count * columns].view(count, columns)
