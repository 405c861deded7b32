"""Official SDK: every loss, and custom losses in both forms, on a fresh adapter (which is the base model)."""

from __future__ import annotations

from typing import Any

import tinker
import torch
from report import ADAM, MODEL, RANK, SEQUENCES, done, error_of, outputs, say

OLD = [-4.0, -3.5, -6.0, -2.5, -5.0, -4.5, -3.0, -5.5]  # what a sampler is said to have given
ADVANTAGES = [0.0, 1.0, -1.0, 0.5, -2.0, 1.5, 2.0, -0.5]
WEIGHTS = [0.0, 1.0, 0.5, -1.0, 2.0, 1.0, 0.25, 1.0]
SOFT = [[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]  # repeated along the sequence
CONFIGS: dict[str, list[dict[str, float] | None]] = {
    "importance_sampling": [None],
    "ppo": [None, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}],
    "cispo": [None, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}],
    "dro": [{"beta": 0.05}],
    "gspo": [None],
}


def datum(ids: list[int], **inputs: Any) -> tinker.Datum:
    given = {"target_tokens": ids[1:], **inputs}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def weighted() -> list[tinker.Datum]:
    return [datum(ids, weights=WEIGHTS[: len(ids) - 1]) for ids in SEQUENCES]


def scored(**more: Any) -> list[tinker.Datum]:
    return [
        datum(ids, logprobs=OLD[:n], advantages=ADVANTAGES[:n], **{k: v[:n] for k, v in more.items()})
        for ids in SEQUENCES
        for n in [len(ids) - 1]
    ]


def soft_targets(ids: list[int], *, sparse: bool) -> tinker.Datum:
    """Three targets a position; a CSR tensor when it is sparse, by the client's own rule."""
    length = len(ids) - 1
    wide = 32 if sparse else 3
    targets, weights = torch.zeros(length, wide, dtype=torch.int64), torch.zeros(length, wide)
    targets[:, :3] = torch.tensor([[t, (t + 1) % 256, (t + 2) % 256] for t in ids[1:]])
    weights[:, :3] = torch.tensor([SOFT[i % 3] for i in range(length)])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def by_callable(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    losses = [
        -(given * datum.loss_fn_inputs["weights"].to_torch()).sum()
        for datum, given in zip(data, logprobs, strict=True)
    ]
    return torch.stack(losses).sum(), {"seen": float(len(data))}


def by_handle(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * weights).sum(), {
        "custom/weight:sum": weights.sum(),
        "custom/top:mean": logprobs.max(),
    }


def main() -> None:
    service = tinker.ServiceClient()
    run = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
    say("weighted", **outputs(run.forward_backward(weighted(), "cross_entropy").result()))
    plain = [datum(ids) for ids in SEQUENCES]
    say("unweighted", **outputs(run.forward_backward(plain, "cross_entropy").result()))
    for name, sparse in (("soft", False), ("sparse", True)):
        data = [soft_targets(ids, sparse=sparse) for ids in SEQUENCES]
        result = run.forward_backward(data, "cross_entropy").result()
        shapes = [list(output["logprobs"].shape) for output in result.loss_fn_outputs]
        csr = data[0].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
        say(name, shapes=shapes, csr=csr, **outputs(result))
    for name, configs in CONFIGS.items():
        for i, config in enumerate(configs):
            result = run.forward_backward(scored(), name, loss_fn_config=config).result()
            say(f"{name} {i}", metrics=result.metrics, **outputs(result))
    refused = error_of(lambda: run.forward_backward(scored(), "stable_reinforce").result())
    say("stable_reinforce", error=refused)

    handle = service.create_custom_loss(by_handle, {"logprobs": 1, "weights": 1}).result()
    say("handle", loss_id=handle.loss_id)
    for name in ("cross_entropy", "callable", "handle"):
        run = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
        if name == "cross_entropy":
            result = run.forward_backward(weighted(), name).result()
        else:
            loss = by_callable if name == "callable" else handle
            result = run.forward_backward_custom(weighted(), loss).result()
        run.optim_step(tinker.AdamParams(**ADAM)).result()
        after = outputs(run.forward(weighted(), "cross_entropy").result())
        say(f"stepped by {name}", metrics=result.metrics, after=after)


if __name__ == "__main__":
    main()
    done()
