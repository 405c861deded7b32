"""On-policy distillation: a student samples, a larger teacher scores its tokens.

    python examples/distill.py --teacher path/to/a/bigger/model --steps 10

A token's advantage is the teacher's logprob minus the student's. Both must share a tokenizer. One process, or
one server, can hold several base models.
"""

import argparse

import numpy as np

import tinkex
from tinkex.rl import rl_datum

PROMPTS = ["Why is the sky blue?", "How do magnets work?", "What is a prime number?", "Why do leaves fall?"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="the student")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()

    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(options.model, rank=16)
        teacher = service.create_sampling_client(base_model=options.teacher)
        tokenizer = run.get_tokenizer()
        prompts = [tinkex.render_chat(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
        params = tinkex.SamplingParams(max_tokens=options.max_tokens, temperature=1.0)
        for step in range(options.steps):
            student = run.save_weights_and_get_sampling_client()
            asked = [student.sample(tinkex.ModelInput.from_ints(p), options.group, params) for p in prompts]
            answers = [
                (prompt, sequence)
                for prompt, future in zip(prompts, asked, strict=True)
                for sequence in future.result().sequences
            ]
            scored = [
                teacher.compute_logprobs(tinkex.ModelInput.from_ints([*prompt, *sequence.tokens]))
                for prompt, sequence in answers
            ]
            data, distances = [], []
            for (prompt, sequence), future in zip(answers, scored, strict=True):
                mine = np.array(sequence.logprobs, np.float32)
                theirs = np.array(future.result()[len(prompt) :], np.float32)
                distances.append(float(np.mean(mine - theirs)))
                data.append(rl_datum(prompt, sequence, theirs - mine))
            run.forward_backward(data, "importance_sampling")
            run.optim_step(tinkex.AdamParams(learning_rate=options.learning_rate)).result()
            print(f"step {step:3d}   KL(student, teacher) per token {np.mean(distances):.4f}")
        print("adapter:", run.save_weights_for_sampler("distilled").result().path)


if __name__ == "__main__":
    main()
