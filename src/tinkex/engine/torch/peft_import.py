"""Read a PEFT adapter of any origin as one of ours: every part of the trained kinds, one rank, alpha 32.

The function it computes stays the same. A module that it does not adapt gets A and B of zeros, which no step
changes, so training continues on the same modules. A smaller rank is padded the same way. Another scale
(lora_alpha, patterns, rank-stabilised LoRA) is multiplied into B. Stacked and fused matrices are taken apart.
What our adapters cannot represent is refused by name. Reads only tensors and JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.adapters import ALPHA
from tinkex.engine.torch.hooks import Part
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.families import our_name
from tinkex.types.params import LoraConfig

PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_FULL = re.compile(r"\.(?:base_layer|original_module|modules_to_save)(?:\.(?!weight$|bias$)[^.]+)?(?=\.)")
# Matrices that our decoder has in parts.
_FUSED = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    "in_proj": ("gate_proj", "x_proj"),
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_EXPERT_PARTS = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
_STACKED = re.compile(r"(.*?)(?:\.experts|\.input_linear|\.output_linear)(?:\.base_layer)*")
# Initialisations that change the base's weights too, unless PEFT converted the adapter when it was saved.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_REFUSED = {
    "use_dora": "DoRA scales the base's weights, too",
    "lora_bias": "adapters here have no bias next to B",
    "layer_replication": "this base model has every layer once",
    "trainable_token_indices": "rows of the embedding are not trained here",
    "alora_invocation_tokens": "an adapter here is on for every token",
    "use_qalora": "its A reads pooled inputs",
}


class Low(NamedTuple):
    """One module's A [R, I] and B [O, R]; of stacked experts [E, R, I] and [E, O, R], E 1 where shared."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


def as_ours(
    directory: Path, peft: Mapping[str, Any], tensors: Mapping[str, Tensor], decoder: Decoder
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The adapter's shape, and its tensors by our names with every part of the trained kinds."""
    _check_settings(directory, peft)
    modules = _modules(directory, peft, tensors, decoder)
    if not modules:
        raise user_error(f"{directory} adapts nothing: it holds no lora_A and lora_B")
    parts = {part.name: (part, width) for width, group in decoder.sites().values() for part in group}
    adapter = _OntoParts(directory, peft, decoder, parts)
    for name, low in modules.items():
        adapter.add(name, low)
    return adapter.filled()


def _check_settings(directory: Path, peft: Mapping[str, Any]) -> None:
    kind = peft.get("peft_type", "LORA")
    if str(kind).upper() != "LORA":
        raise user_error(f"{directory} is a PEFT adapter of type {kind}; allowed: LORA")
    for key, why in _REFUSED.items():
        if peft.get(key):
            raise user_error(f"{directory}: {key} is {peft[key]!r:.80}, and {why}; it cannot be read here")
    start = str(peft.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise user_error(
            f"{directory}: init_lora_weights is {start!r}, so it belongs to a changed base model. Save it "
            "again with PEFT's path_initial_model_for_weight_conversion, and import that"
        )


def _modules(
    directory: Path, peft: Mapping[str, Any], tensors: Mapping[str, Tensor], decoder: Decoder
) -> dict[str, Low]:
    """A and B of every adapted module by its name in the base model; other tensors must be the base's."""
    sides: dict[str, dict[str, Tensor]] = {}
    adapters: set[str] = set()
    for key, tensor in tensors.items():
        name = _WRAPPERS.sub("", key).removeprefix(PREFIX)
        if (found := _LORA.fullmatch(name)) is None:
            _check_unchanged(directory, name, tensor, decoder)
            continue
        module, side, adapter = found.groups()
        adapters.add(adapter or "default")
        sides.setdefault(module, {})[side] = tensor
    if len(adapters) > 1:
        raise user_error(f"{directory} holds several adapters ({', '.join(sorted(adapters))}); give one")
    modules = {}
    for module, pair in sides.items():
        if len(pair) < 2:
            raise user_error(f"{directory} has lora_{next(iter(pair))} of {module} without the other side")
        if not (pair["A"].numel() and pair["B"].numel()):
            raise user_error(f"{directory}: {module} has empty tensors; was it saved from a sharded model?")
        rank, scale = scale_of(directory, peft, module)
        ours = our_name(f"{module}.weight").removesuffix(".weight")
        modules[hosted_name(ours, decoder)] = Low(pair["A"].float(), pair["B"].float(), scale)
        if pair["A"].shape[-2] % rank:
            raise user_error(
                f"{directory}: {module} has {pair['A'].shape[-2]} rows in A, and adapter_config.json says "
                f"rank {rank}"
            )
    return modules


def scale_of(directory: Path, peft: Mapping[str, Any], module: str) -> tuple[int, float]:
    """A module's rank and its scale; patterns are matched as PEFT matches them."""

    def of(key: str, pattern_key: str) -> Any:
        patterns = peft.get(pattern_key) or {}
        found = (p for p in patterns if re.fullmatch(rf"(.*\.)?({p})", module))
        return patterns.get(next(found, None), peft.get(key))

    try:
        rank, alpha = int(of("r", "rank_pattern")), float(of("lora_alpha", "alpha_pattern"))
    except (TypeError, ValueError, re.error) as error:
        raise user_error(f"{directory}/adapter_config.json: no rank and lora_alpha ({error})") from None
    if rank < 1:
        raise user_error(f"{directory}/adapter_config.json: the rank of {module} is {rank}")
    return rank, alpha / (rank**0.5 if peft.get("use_rslora") else rank)


def hosted_name(name: str, decoder: Decoder) -> str:
    """Hosted Tinker names the head and gpt-oss' attention in its own way."""
    name = name.replace("model.unembed_tokens", "lm_head")
    if any(".self_attn." in part.name for _, group in decoder.sites().values() for part in group):
        name = name.replace(".attn.", ".self_attn.")
    return name


def _check_unchanged(directory: Path, name: str, tensor: Tensor, decoder: Decoder) -> None:
    """A full matrix saved with the adapter is ignored if it equals the base's; PEFT writes such ones."""
    if ".lora_" in name:
        what = name.partition(".lora_")
        raise user_error(f"{directory}: {what[0]} has a {'lora_' + what[2]}, which cannot be read here")
    ours = our_name(_FULL.sub("", name))
    known = decoder.weights() | {"lm_head.weight": decoder.unembed_weight}
    base = known.get(ours)
    if base is None or base.shape != tensor.shape or not torch.equal(tensor.to(base), base):
        sizes = f" {list(tensor.shape)}" if base is None else f" {list(tensor.shape)} for {list(base.shape)}"
        raise user_error(
            f"{directory} holds a whole matrix {ours}{sizes} that is not this base model's (modules_to_save, "
            "a resized vocabulary, or another base model). A low-rank adapter cannot hold it: merge it into "
            "the base model with PEFT and use the result as the base, or train without it"
        )


@dataclass(eq=False)
class _OntoParts:
    """Collects A and B by the parts of our decoder."""

    directory: Path
    peft: Mapping[str, Any]
    decoder: Decoder
    parts: dict[str, tuple[Part, int]]
    found: dict[str, Low] = field(default_factory=dict)
    single: dict[str, dict[int, Low]] = field(default_factory=dict)  # of experts, one by one

    def add(self, name: str, low: Low) -> None:
        stem, _, last = name.rpartition(".")
        if name in self.parts:
            self._put(name, low)
        elif (single := _EXPERT.fullmatch(name)) and single[3] in _EXPERT_PARTS:
            part = self._expert_part(single[1], _EXPERT_PARTS[single[3]])
            if part is None:
                raise self._unknown(name, low)
            self.single.setdefault(part, {})[int(single[2])] = low
        elif (stacked := _STACKED.fullmatch(name)) and low.a.dim() == 2:
            self._split_experts(name, stacked[1], low)
        elif last in _FUSED and f"{stem}.{_FUSED[last][0]}" in self.parts:
            self._split_rows(name, low, [f"{stem}.{part}" for part in _FUSED[last]])
        elif low.b.any():
            raise self._unknown(name, low)

    def _unknown(self, name: str, low: Low) -> Exception:
        kinds = sorted({part.rpartition(".")[2] for part in self.parts})
        return user_error(
            f"{self.directory} adapts {name} [{low.b.shape[-2]}, {low.a.shape[-1]}], which carries no "
            f"adapter in this base model ({self.decoder.config.arch}); those that do: {', '.join(kinds)}. Is "
            "it the right base model (--base)?"
        )

    def _put(self, name: str, low: Low) -> None:
        part, width = self.parts[name]
        given, needed = [low.b.shape[-2], low.a.shape[-1]], [part.out_features, width]
        counts = {len(low.a), len(low.b)} if low.a.dim() == 3 else {1}
        if given != needed or low.b.shape[-1] != low.rank or not counts <= {1, part.experts}:
            raise user_error(
                f"{self.directory}: the adapter of {name} is for a matrix {given}, and this base model's is "
                f"{needed}: it was made for another base model (--base NAME)"
            )
        if part.experts > 1 and low.a.dim() == 2:
            low = low._replace(a=low.a[None], b=low.b[None])
        self.found[name] = low

    def _split_rows(self, name: str, low: Low, parts: list[str]) -> None:
        sizes = [self.parts[part][0].out_features for part in parts]
        heads = self.decoder.config.stored_key_heads if name.endswith("qkvz") else 0
        if len(low.b) < sum(sizes) or (name.endswith("qkvz") and not heads):
            raise self._unknown(name, low)
        rest = low.b[sum(sizes) :]
        if rest.any():
            raise user_error(
                f"{self.directory} adapts all rows of {name}; those of B, C and the steps carry none here"
            )
        if heads:
            split = low.b.unflatten(0, (heads, -1)).split([size // heads for size in sizes], 1)
            rows = [piece.flatten(0, 1) for piece in split]
        else:
            rows = list(low.b[: sum(sizes)].split(sizes))
        for part, b in zip(parts, rows, strict=True):
            self._put(part, low._replace(b=b))

    def _expert_part(self, stem: str, part: str) -> str | None:
        """The part called w1, w2 or w3; of experts without a gate, up_proj is w1."""
        sparse, dense = ".block_sparse_moe.", ".mlp."
        stems = (stem, stem.replace(sparse, dense), stem.replace(dense, sparse))
        names = [f"{one}.{part}" for one in stems]
        if part == "w3":
            names += [f"{one}.w1" for one in stems if f"{one}.w1" in self.parts]
        return next((name for name in names if name in self.parts), None)

    def _split_experts(self, name: str, stem: str, low: Low) -> None:
        """What PEFT adapts as a parameter [E, O, I]: A [E·R, I] and B [O, R·E]."""
        up, down = (self._expert_part(f"{stem}.experts", part) for part in ("w1", "w2"))
        config = self.decoder.config.experts
        if up is None or down is None or config is None:
            if low.b.any():
                raise self._unknown(name, low)
            return
        count, rank = config.count, low.a.shape[0] // config.count
        if low.a.shape[0] % count or low.b.shape[1] != low.a.shape[0]:
            raise self._unknown(name, low)
        a = low.a.unflatten(0, (count, rank))
        b = low.b.unflatten(1, (rank, count)).permute(2, 0, 1)
        (up_part, width), (_, inner) = self.parts[up], self.parts[down]
        both = up_part.out_features * (2 if config.gated else 1)
        shapes = {(width, both): "up", (inner, width): "down"}
        turned = {(both, width): "up", (width, inner): "down"}
        given = (a.shape[2], b.shape[1])
        stored_turned = self.decoder.config.arch.startswith("llama4")
        if given in turned and (stored_turned or given not in shapes):
            a, b, shapes = b.transpose(1, 2), a.transpose(1, 2), turned
        if (which := shapes.get(given)) is None:
            raise self._unknown(name, low)
        parameter = "down_proj" if which == "down" else "gate_up_proj" if config.gated else "up_proj"
        scale = scale_of(self.directory, self.peft, f"{stem}.experts.{parameter}")[1]
        if which == "down":
            self._put(down, Low(a, b, scale))
        elif not config.gated:
            self._put(up, Low(a, b, scale))
        else:
            half = both // 2
            rows = slice(half), slice(half, None)
            if config.interleaved:
                rows = slice(0, None, 2), slice(1, None, 2)
            for part, piece in zip((up, up.removesuffix("w1") + "w3"), rows, strict=True):
                self._put(part, Low(a, b[:, piece], scale))

    def _join_experts(self) -> None:
        """Adapters of single experts, stacked; those that there are none of are zeros."""
        for part, given in self.single.items():
            count = self.parts[part][0].experts
            rank, one = max(low.rank for low in given.values()), next(iter(given.values()))
            if max(given) >= count:
                raise user_error(f"{self.directory} adapts expert {max(given)} of {part}; it has {count}")
            a = one.a.new_zeros(count, rank, one.a.shape[-1])
            b = one.b.new_zeros(count, one.b.shape[-2], rank)
            for i, low in given.items():
                if low.a.shape[-1] != a.shape[-1] or low.b.shape[-2] != b.shape[-2]:
                    raise self._unknown(f"{part} of expert {i}", low)
                a[i, : low.rank] = low.a
                b[i, :, : low.rank] = low.b * (low.scale / one.scale)
            self._put(part, Low(a, b, one.scale))

    def filled(self) -> tuple[LoraConfig, dict[str, Tensor]]:
        """All parts of the trained kinds, with one rank and one scale."""
        self._join_experts()
        if not self.found:
            raise user_error(f"{self.directory} adapts nothing that carries adapters in this base model")
        self._check_complete()
        rank = max(low.rank for low in self.found.values())
        kinds = {self.parts[name][0].kind for name in self.found}
        flags = {f"train_{kind}": kind in kinds for kind in ("attn", "mlp", "unembed")}
        lora = LoraConfig(rank, **flags)
        shared = all(self._is_shared(name, low) for name, low in self.found.items())
        tensors: dict[str, Tensor] = {}
        for name, (part, width) in self.parts.items():
            if part.kind in kinds:
                pair = self._padded(part, width, rank, self.found.get(name), shared)
                for side, tensor in zip("AB", pair, strict=True):
                    tensors[f"{PREFIX}{name}.lora_{side}.weight"] = tensor
        return lora, tensors

    def _check_complete(self) -> None:
        """By plain names PEFT adapts a module of every layer: a layer without one is another model's."""
        targets = self.peft.get("target_modules")
        selective = ("layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters")
        if not isinstance(targets, list) or any(self.peft.get(key) for key in selective):
            return
        adapted = {name.rpartition(".")[2] for name in self.found} & set(targets)
        missing = [n for n in self.parts if n.rpartition(".")[2] in adapted and n not in self.found]
        if missing:
            raise user_error(
                f"{self.directory} adapts {missing[0].rpartition('.')[2]} of every layer of its base model, "
                f"and {missing[0]} is missing: it was made for another base model (--base NAME)"
            )

    def _is_shared(self, name: str, low: Low) -> bool:
        """Do all experts have the factor in common that ours share?"""
        part = self.parts[name][0]
        return part.experts == 1 or len(low.a if part.shared == "A" else low.b) == 1

    def _padded(
        self, part: Part, width: int, rank: int, low: Low | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        stacked = ".experts." in f"{part.name}."
        counts = [1 if shared and part.shared == side else part.experts for side in "AB"] if stacked else []
        a = torch.zeros(*counts[:1], rank, width)
        b = torch.zeros(*counts[1:], part.out_features, rank)
        if low is not None:
            factor = low.scale * rank / ALPHA
            a[..., : low.rank, :] = low.a
            b[..., : low.rank] = low.b if factor == 1.0 else low.b * factor
        return a, b
