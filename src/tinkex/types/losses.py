"""Custom losses: a graph of tensor operations that a client traces and a server evaluates.

Knows the graph's shape on the wire only; what may be called in it is the engine's to decide.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tinkex.types.base import Count, ReplyModel, RequestModel

CustomLossInputRank = Literal[0, 1, 2]  # a number, one per token, or several per token
CustomLossNodeOp = Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]


class CustomLossInput(RequestModel):
    """A parameter of the loss: "logprobs" first, then keys of loss_fn_inputs."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(RequestModel):
    """One operation, in order of execution; arguments name earlier nodes as {"ref": name}."""

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomLossGraph(RequestModel):
    """The whole loss of one datum."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(RequestModel):
    """Upload a loss, to be used by its id."""

    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: list[CustomLossInput] = Field(max_length=16)
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(ReplyModel):
    """The loss's id, for `loss_fn_config`."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
