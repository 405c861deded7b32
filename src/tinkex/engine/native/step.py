"""Decode steps of a dense fp32 decoder on the CPU, each one call of `step.c`.

Holds a second copy of the weights in the layout that the C code reads, made at the first step, and passes it
addresses of everything else: norms, the KV cache's pages, adapters. Logits are batch-invariant and,
to rounding, the decoder's. Knows of a sequence only its tokens, positions, pages and adapter.

Shapes: N rows, one for each sequence, V padded vocabulary, W pages of the longest sequence, C head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.native.build import library
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.huge_pages import HugeArena
from tinkex.engine.torch.kv import PAGE, KVCache
from tinkex.engine.torch.models.attention import Attention
from tinkex.engine.torch.models.decoder import Decoder, DecoderLayer
from tinkex.engine.torch.models.mlp import Mlp
from tinkex.engine.torch.models.projection import Projection

_SHARED_WORK = 1 << 20  # multiplications of an average product from which on waking threads pays
Row = tuple[int, int, Sequence[int], Adapter | None]  # a sequence's newest token, position, pages, adapter


class NativeBackend(Backend):
    """Plain torch for fp32 on a CPU, but for the decode steps of dense decoders."""

    def compiled_step(self, decoder: Decoder, room: float) -> Callable[[KVCache], CompiledStep] | None:
        """None for other layers and experts, without a compiler, or if a second copy exceeds `room` bytes."""
        dense = decoder.uniform and decoder.config.experts is None
        if not dense or decoder.multiplied_bytes > room or (compiled := library()) is None:
            return None
        return partial(CompiledStep, compiled, decoder)


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LinearStruct(Structure):
    _fields_ = [
        *_all(c_void_p, "weight bias"),
        *_all(c_int32, "in_features out_features parts"),
        ("outs", c_int32 * 3),
    ]


class LayerStruct(Structure):
    _fields_ = [
        *_all(c_void_p, "attention_norm mlp_norm q_norm k_norm keys values"),
        ("window", c_int64),
        *_all(LinearStruct, "qkv o gate_up down"),
    ]


class ModelStruct(Structure):
    _fields_ = [
        *_all(c_int32, "layers width heads kv_heads head_dim page"),
        ("eps", c_float),
        *_all(c_void_p, "embedding norm"),
        ("layer", POINTER(LayerStruct)),
        ("head", LinearStruct),
    ]


class SiteStruct(Structure):
    _fields_ = _all(c_void_p, "a b")


class AdapterStruct(Structure):
    _fields_ = [("sites", POINTER(SiteStruct)), ("rank", c_int32), ("scale", c_float)]


class StepStruct(Structure):
    _fields_ = [
        *_all(c_int32, "rows threads table_width"),
        *_all(c_void_p, "tokens positions cos sin table adapters scratch logits"),
    ]


class CompiledStep:
    """Decode steps of one decoder over one cache; the tensors of neither may move."""

    def __init__(self, compiled: ctypes.CDLL, decoder: Decoder, cache: KVCache) -> None:
        self._c, self._config, self._decoder = compiled, decoder.config, decoder
        self._kept: list[Any] = [cache]  # keeps alive what the structs point to
        self._sites = list(decoder.sites())
        self._layers = (LayerStruct * decoder.config.layers)()
        for i, layer in enumerate(self._layers):
            layer.keys, layer.values = (pool.data_ptr() for pool in cache.layer(i))
        self._made: ModelStruct | None = None
        self._tables: WeakKeyDictionary[Adapter, AdapterStruct] = WeakKeyDictionary()
        self._row_work = decoder.multiplied_bytes // 4 // len(self._sites)
        self._cos = self._sin = np.empty((0, 0), np.float32)
        self._scratch = np.empty(0, np.float32)

    @property
    def _model(self) -> ModelStruct:
        if self._made is None:  # an engine that only trains never comes here
            self._made = self._describe(self._decoder)
        return self._made

    def _describe(self, decoder: Decoder) -> ModelStruct:
        c, address = decoder.config, self._address
        matrices = [decoder.unembed_weight, *(p.weight for p in decoder.projections())]
        arena = HugeArena(sum(HugeArena.size_of([self._floats(w)], torch.float32) for w in matrices))
        project = partial(self._projection, arena)
        for target, layer, window in zip(self._layers, decoder.layers, c.windows, strict=True):
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.mixer, layer.mlp
            assert isinstance(attention, Attention)
            assert isinstance(mlp, Mlp)
            target.attention_norm, target.mlp_norm = address(layer.mixer_norm), address(layer.mlp_norm)
            target.q_norm, target.k_norm = address(attention.q_norm), address(attention.k_norm)
            target.qkv, target.o = project(attention.qkv), project(attention.o)
            target.gate_up, target.down = project(mlp.gate_up), project(mlp.down)
            target.window = window or 0
        head = self._linear(arena, decoder.unembed_weight, None, [c.padded_vocab])
        heads = c.attention[0]
        sizes = c.layers, c.width, heads.heads, heads.kv_heads, heads.head_dim, PAGE, c.norm.eps
        return ModelStruct(*sizes, address(decoder.embedding), address(decoder.norm), self._layers, head)

    def _projection(self, arena: HugeArena, module: Projection) -> LinearStruct:
        return self._linear(arena, module.weight, module.bias, [part.out_features for part in module.parts])

    def _linear(self, arena: HugeArena, weight: Tensor, bias: Tensor | None, outs: list[int]) -> LinearStruct:
        out_features, in_features = weight.shape
        packed = arena.take([self._floats(weight)], torch.float32)
        out_stride, in_stride = weight.stride()
        self._c.pack(weight.data_ptr(), in_features, out_features, in_stride, out_stride, packed.data_ptr())
        sizes = in_features, out_features, len(outs), (c_int32 * 3)(*outs)
        return LinearStruct(self._address(packed), self._address(bias), *sizes)

    def _floats(self, weight: Tensor) -> int:
        return self._c.packed_floats(*reversed(weight.shape))

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _table(self, adapter: Adapter) -> AdapterStruct:
        """The addresses of an adapter's matrices; made once, as a published adapter never moves."""
        if adapter not in self._tables:
            sites = (SiteStruct * len(self._sites))()
            for entry, site in zip(sites, self._sites, strict=True):
                if (shape := adapter.shapes.get(site)) is not None:
                    entry.a = adapter.flat.data_ptr() + 4 * shape.start
                    entry.b = entry.a + 4 * shape.rank * len(shape.parts) * shape.in_features
            self._tables[adapter] = AdapterStruct(sites, adapter.lora.rank, adapter.scale)
        return self._tables[adapter]

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Compute one token of each row: stores keys and values in their pages, returns the logits [N, V]."""
        n = len(rows)
        tokens = np.array([token for token, *_ in rows], np.int64)
        positions = np.array([position for _, position, *_ in rows], np.int64)
        table = np.zeros((n, int(positions.max()) // PAGE + 1), np.int32)
        for held, (_, position, pages, _) in zip(table, rows, strict=True):
            used = position // PAGE + 1
            held[:used] = pages[:used]
        adapters = (c_void_p * n)(
            *(addressof(self._table(adapter)) if adapter else None for *_, adapter in rows)
        )
        arrays = tokens, positions, *self._angles(positions), table
        addresses = (array.ctypes.data for array in arrays)
        logits_NV = torch.empty(n, self._config.padded_vocab)
        scratch = self._scratch_for(n).ctypes.data
        step = StepStruct(
            n, self.threads(n), table.shape[1], *addresses, addressof(adapters), scratch, logits_NV.data_ptr()
        )
        self._c.decode(byref(self._model), byref(step))
        return logits_NV

    def threads(self, rows: int) -> int:
        """How many threads share a step: waking one costs as much as a small product."""
        return torch.get_num_threads() if rows * self._row_work >= _SHARED_WORK else 1

    def draw(
        self, logits_NV: Tensor, temperature: np.ndarray, keys: np.ndarray
    ) -> tuple[list[int], list[float]]:
        """Draw a token per row from its key's random stream, as `next_tokens.draw` does, with its logprob."""
        assert logits_NV.is_contiguous()
        n, padded = logits_NV.shape
        tokens, logprobs = np.empty(n, np.int64), np.empty(n, np.float32)
        addresses = (array.ctypes.data for array in (temperature, keys, tokens, logprobs))
        self._c.draw(logits_NV.data_ptr(), n, self._config.vocab_size, padded, *addresses)
        return tokens.tolist(), logprobs.tolist()

    def _angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [N, C / 2], from tables that grow with the longest sequence seen."""
        longest = int(positions.max())
        if longest >= len(self._cos):
            upto = torch.arange(1 << max(9, (longest + 1).bit_length()))
            self._cos, self._sin = (t.numpy() for t in self._config.rope.angles(upto, torch.float32))
        return self._cos[positions], self._sin[positions]

    def _scratch_for(self, rows: int) -> np.ndarray:
        floats = self._c.scratch_floats(byref(self._model), rows)
        if floats > len(self._scratch):
            self._scratch = np.empty(floats, np.float32)
        return self._scratch
