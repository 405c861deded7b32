"""Optimizers: a run's choice, and the settings of one step.

AdamW and Dimuon are typed; any other `{type, …}` is passed through to the server. `AdamParams` is in
params.py, so that an engine can import it without pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from tinkex.types.base import AnyJson, Plain, RequestModel
from tinkex.types.params import AdamParams


class AdamOptimizerConfig(RequestModel):
    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(RequestModel):  # not every server supports it
    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


class OtherOptimizerConfig(RequestModel):  # one that this version does not know, with any settings
    model_config = ConfigDict(extra="allow")
    type: str


class DimuonParams(RequestModel):
    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = Field(ge=0)
    grad_clip_norm: float = 0.0
    beta1: float = 0.9


class OtherOptimParams(RequestModel):  # likewise
    model_config = ConfigDict(extra="allow")
    type: str


def _kind(value: AnyJson | Mapping[str, Any] | RequestModel) -> str | None:
    if not isinstance(value, Mapping | AdamOptimizerConfig | DimuonOptimizerConfig | OtherOptimizerConfig):
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value.type
    return kind if kind in ("adamw", "dimuon") else "other"


OptimizerConfig = Annotated[
    Annotated[AdamOptimizerConfig, Tag("adamw")]
    | Annotated[DimuonOptimizerConfig, Tag("dimuon")]
    | Annotated[OtherOptimizerConfig, Tag("other")],
    Discriminator(
        _kind, "optimizer", "must be AdamOptimizerConfig, DimuonOptimizerConfig or a dict with their 'type'"
    ),
]


def _step_kind(value: AnyJson | Mapping[str, Any] | AdamParams | RequestModel) -> str | None:
    if isinstance(value, AdamParams):
        return "adam"
    if not isinstance(value, Mapping | DimuonParams | OtherOptimParams):
        return None
    kind = value.get("type", "adam") if isinstance(value, Mapping) else value.type
    return kind if kind in ("adam", "dimuon") else "other"


OptimParams = Annotated[
    Annotated[AdamParams, Plain, Tag("adam")]
    | Annotated[DimuonParams, Tag("dimuon")]
    | Annotated[OtherOptimParams, Tag("other")],
    Discriminator(_step_kind, "step", "must be AdamParams, DimuonParams or a dict of their settings"),
]
