"""Evaluate a checkpoint: check greedy answers, and score the right answers.

    python examples/evaluate.py questions.jsonl tinker://…/sampler_weights/sft
    python examples/evaluate.py questions.jsonl SmolLM2-135M-Instruct           # {"question": …, "answer": …}

An answer is right if it contains the expected text.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import tinkex


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=Path)
    parser.add_argument("model", help="a base model's name or directory, or a tinker:// path of an adapter")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()

    with tinkex.ServiceClient() as service:
        is_path = options.model.startswith("tinker://")
        sampler = service.create_sampling_client(**{"model_path" if is_path else "base_model": options.model})
        tokenizer = sampler.get_tokenizer()
        rows = [json.loads(line) for line in options.questions.read_text().splitlines() if line.strip()]
        prompts = [tinkex.render_chat(tokenizer, [{"role": "user", "content": r["question"]}]) for r in rows]
        answers = [tokenizer.encode(r["answer"], add_special_tokens=False) for r in rows]
        params = tinkex.SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
        # All at once: the engine batches them.
        said = [sampler.sample(tinkex.ModelInput.from_ints(p), 1, params) for p in prompts]
        scored = [
            sampler.compute_logprobs(tinkex.ModelInput.from_ints(prompt + answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        right, logprobs = 0, []
        for row, prompt, sample, scores in zip(rows, prompts, said, scored, strict=True):
            text = tokenizer.decode(sample.result().sequences[0].tokens, skip_special_tokens=True).strip()
            good = row["answer"].lower() in text.lower()
            right += good
            logprobs.append(np.mean([x for x in scores.result()[len(prompt) :] if x is not None]))
            print(f"{'right' if good else 'wrong'}   {row['question']}   ->   {text!r}")
        print(
            f"{right} of {len(rows)} right, mean logprob of the right answers {np.mean(logprobs):.3f} a token"
        )


if __name__ == "__main__":
    main()
