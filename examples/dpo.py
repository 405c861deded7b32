"""Direct preference optimisation with a custom loss in torch.

    python examples/dpo.py pairs.jsonl          # {"prompt": …, "chosen": …, "rejected": …} a line

The reference is the base model: its logprobs are computed once, before the first step. The loss runs in this
script, on the logprobs of a forward pass; a second pass applies its gradients to the adapter.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import tinkex
from tinkex.data import chat_datum


def dpo(references: np.ndarray, beta: float):
    """The loss of datums chosen, rejected, chosen, rejected, …; `references` are their logprobs' sums."""
    import torch
    from torch.nn.functional import logsigmoid

    def loss(data, logprobs):
        sums = torch.stack([
            (lp * d.loss_fn_inputs["weights"].to_torch()).sum()
            for d, lp in zip(data, logprobs, strict=True)
        ])  # fmt: skip
        margins = beta * (sums - torch.as_tensor(references)).reshape(-1, 2) @ torch.tensor([1.0, -1.0])
        wins = (margins > 0).float().mean()
        return -logsigmoid(margins).mean(), {"margin": margins.mean().item(), "accuracy": wins.item()}

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    options = parser.parse_args()

    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(options.model, rank=16)
        tokenizer = run.get_tokenizer()
        data = []
        for line in options.pairs.read_text().splitlines():
            pair = json.loads(line)
            for text in (pair["chosen"], pair["rejected"]):
                asked, said = (
                    {"role": "user", "content": pair["prompt"]},
                    {"role": "assistant", "content": text},
                )
                data.append(chat_datum(tokenizer, [asked, said]))
        before = run.forward(data, "cross_entropy").result().loss_fn_outputs
        references = np.array([
            np.dot(output["logprobs"].to_numpy(), datum.loss_fn_inputs["weights"].to_numpy())
            for output, datum in zip(before, data, strict=True)
        ], np.float32)  # fmt: skip
        for step in range(options.steps):
            metrics = run.forward_backward_custom(data, dpo(references, options.beta)).result().metrics
            run.optim_step(tinkex.AdamParams(learning_rate=options.learning_rate)).result()
            print(f"step {step:3d}   margin {metrics['margin']:+.4f}   accuracy {metrics['accuracy']:.2f}")
        print("adapter:", run.save_weights_for_sampler("dpo").result().path)


if __name__ == "__main__":
    main()
