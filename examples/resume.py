"""A training loop that resumes after Ctrl-C or a crash.

    python examples/resume.py --steps 40        # interrupt it, and run the same command again

Every few steps it saves the adapter and the optimizer state, and writes the checkpoint's path and step to a
file. Data comes in a fixed order, so the losses equal those of one uninterrupted run.
"""

import argparse
import json
from pathlib import Path

import tinkex
from tinkex.data import weighted_datum

TEXT = "the quick brown fox jumps over the lazy dog and runs away into the deep dark wood "


def batch_of(tokenizer, step: int) -> list[tinkex.Datum]:
    """The data of a step: a function of the step alone."""
    tokens = tokenizer.encode(TEXT[step % 10 :] + TEXT)
    return [weighted_datum(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--state", type=Path, default=Path("resume.json"))
    options = parser.parse_args()

    with tinkex.ServiceClient() as service:
        if options.state.exists():
            saved = json.loads(options.state.read_text())
            run = service.create_training_client_from_state_with_optimizer(saved["path"])
            print(f"going on after step {saved['step']} from {saved['path']}")
        else:
            saved = {"step": 0}
            run = service.create_lora_training_client(options.model, rank=8, seed=0)
        tokenizer = run.get_tokenizer()
        for step in range(saved["step"] + 1, options.steps + 1):
            passed = run.forward_backward(batch_of(tokenizer, step), "cross_entropy")
            run.optim_step(tinkex.AdamParams(learning_rate=1e-3))
            print(f"step {step:3d}   loss {passed.result().metrics['loss:sum']:.4f}")
            if step % options.save_every == 0 or step == options.steps:
                path = run.save_state(f"step-{step:04d}").result().path
                fresh = options.state.with_suffix(".new")
                fresh.write_text(json.dumps({"step": step, "path": path}))
                fresh.replace(options.state)  # whole, or not at all
        print("done:", options.state)


if __name__ == "__main__":
    main()
