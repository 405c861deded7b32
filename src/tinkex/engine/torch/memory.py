"""Memory estimates: what a pass needs and what is free, for the sizes of micro-batches and for recomputation.

Estimates are conservative, and nothing is allocated here. Knows shapes, not tensors.
"""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import suppress
from pathlib import Path

import torch

from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LayerConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    RecurrentConfig,
)
from tinkex.engine.torch.models.delta_net import CHUNK

# Tokens of a micro-batch: enough for efficient products, few enough not to delay sampling for long.
PASS_TOKENS = {"cpu": 1024, "cuda": 16384}
_LARGE_PASS = 512 << 20  # bytes of activations from which a pass on a CPU has fewer tokens
_FEWER_TOKENS = 768
_SHARE = 0.5  # of the free memory that one pass may plan with
_KEPT = 1 << 30  # bytes of a pass's activations that malloc may keep
_KEPT_SHARE = 1 / 8  # of the free memory, at most
# mallopt's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD; the last two have these as their largest values
_KEEPING = {-1: _KEPT, -2: 64 << 20, -3: 32 << 20}


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # ten times as fast as memory_reserved()
        return free + stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(free, container_free(Path("/sys/fs/cgroup")))


def container_free(group: Path) -> float:
    """What the memory limit of the control group leaves; infinite without a limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such group, or the limit is "max"
        return math.inf
    cached = 0  # counted as used, but given up as soon as memory is needed
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(size) for name, size in lines if name in ("inactive_file", "active_file"))
    return max(0, limit - used + cached)


def activation_bytes(config: ModelConfig, itemsize: int, *, recompute: bool) -> int:
    """What one token of a forward keeps for its backward."""
    layers = [_layer_values(config, layer) for layer in config.stack]
    kept = max(layers) + config.layers * config.width if recompute else sum(layers)
    return itemsize * (kept + 4 * config.width)


def _layer_values(config: ModelConfig, layer: LayerConfig) -> int:
    """What one token of a layer keeps."""
    values = 4 * config.width  # two sums and two norms of the residual
    match layer.mixer:
        case AttentionConfig() as mixer:
            heads, kv_heads = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            values += 2 * heads + 2 * kv_heads  # q, k, v; attention's output
            if mixer.qk_norm:  # q and k as they were before
                values += heads + 2 * kv_heads
        case DeltaConfig() as mixer:
            # before and after the convolution, q and k as units, v, the result normed and gated; in chunks
            # the decays and products of pairs, both sides of the solve, and states of the chunks' ends
            heads, pairs = mixer.value_heads, 4 * CHUNK
            values += 4 * mixer.channels + 6 * mixer.widths[3]
            values += heads * (pairs + 3 * (mixer.key_dim + mixer.value_dim))
            values += 2 * heads * mixer.key_dim * mixer.value_dim // CHUNK
        case MambaConfig() as mixer:
            # before and after the convolution, x times its step, the result gated and normed; in chunks the
            # decays and products of pairs, and states of the chunks' ends
            values += 4 * mixer.channels + 9 * mixer.width + 4 * mixer.heads * CHUNK
            values += 3 * mixer.width * mixer.state_dim // CHUNK
        case RecurrentConfig() as mixer:  # a state of every token, its decay, and what is added to it
            values += 3 * max(map(math.prod, mixer.state_shapes))
    match layer.mlp:
        case MlpConfig(width=width):
            values += 3 * width  # gate, up and their product
        case ExpertsConfig(per_token=per_token, width=width, shared=shared):
            values += per_token * (3 * width + 3 * config.width) + (3 * shared.width if shared else 0)
    return values


def must_recompute(config: ModelConfig, itemsize: int, device: torch.device, tokens: int) -> bool:
    """Whether a micro-batch of `tokens` fits only if its layers are recomputed in the backward."""
    return tokens * activation_bytes(config, itemsize, recompute=False) > free_bytes(device) * _SHARE


def pass_tokens(config: ModelConfig, itemsize: int, device: torch.device) -> int:
    """Tokens of a micro-batch: as many as fit without recomputation, unless those are too few."""
    room, most = int(free_bytes(device) * _SHARE), PASS_TOKENS.get(device.type, 2048)
    token = activation_bytes(config, itemsize, recompute=False)
    if device.type == "cpu" and most * token > _LARGE_PASS:
        most = _FEWER_TOKENS
    fitting = room // token
    if fitting < most // 4:
        fitting = room // activation_bytes(config, itemsize, recompute=True)
    return max(256, min(most, fitting))


def keep_pages(config: ModelConfig, itemsize: int, tokens: int, device: torch.device) -> bool:
    """Make malloc keep the memory that a CPU pass of `tokens` frees, if that is little; whether it does.

    Every pass allocates the same activations again. If malloc returns them to the system, the system clears
    their pages each time, which takes 5 % of a small model's pass. Works only with glibc.
    """
    needed = tokens * activation_bytes(config, itemsize, recompute=False)
    if device.type != "cpu" or needed > min(_KEPT, free_bytes(device) * _KEPT_SHARE):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(mallopt(parameter, value) for parameter, value in _KEEPING.items())
