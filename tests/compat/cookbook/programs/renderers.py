"""Renders a conversation with each renderer, learns it by heart on its model, and asks for the answer.

    python renderers.py MODEL:RENDERER...

Prints a line of JSON for each, and one with every renderer that the cookbook recommends for a model. Runs
where the cookbook is installed; imports nothing of this project.
"""

import json
import math
import sys
import traceback

import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

STEPS, LEARNT = 60, 0.02  # at most so many steps, fewer where the loss is as low as that
QUESTION: list[renderers.Message] = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
]
PLAIN: renderers.Message = {"role": "assistant", "content": "Rome"}
THOUGHT: renderers.Message = {
    "role": "assistant",
    "content": [
        renderers.ThinkingPart(type="thinking", thinking="Easy."),
        renderers.TextPart(type="text", text="Rome"),
    ],
}


def main() -> None:
    service = tinker.ServiceClient()
    for row in sys.argv[1:]:
        try:
            facts = learn(service, *row.split(":"))
        except Exception:
            facts = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps({"row": row, **facts}), flush=True)
    known = [getattr(model_info, name) for name in dir(model_info) if name.endswith("_info")]
    every = {name for of in known for model in of().values() for name in model.recommended_renderers}
    print(json.dumps({"row": "every renderer", "names": sorted(every)}))


def learn(service: tinker.ServiceClient, model: str, name: str) -> dict[str, object]:
    tokenizer = get_tokenizer(model)
    renderer = renderers.get_renderer(name, tokenizer, model_name=model)
    prompt = renderer.build_generation_prompt(QUESTION)
    last = renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE
    for answer in (PLAIN, THOUGHT):
        datum = conversation_to_datum([*QUESTION, answer], renderer, max_length=None, train_on_what=last)
        # a prompt that opens a thought is not how every renderer begins an answer without one
        if datum.model_input.to_ints()[: prompt.length] == prompt.to_ints():
            break
    run = service.create_lora_training_client(model, rank=8, seed=1)
    adam = tinker.AdamParams(learning_rate=1e-2)
    losses = [math.inf]
    while len(losses) <= STEPS and losses[-1] > LEARNT:
        done = run.forward_backward([datum], "cross_entropy")
        run.optim_step(adam)
        losses.append(done.result().metrics["loss:sum"])
    final = run.forward([datum], "cross_entropy").result()
    sampler = run.save_weights_and_get_sampling_client()
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    text = tinker.ModelInput.from_ints([*datum.model_input.to_ints(), targets[-1]])
    scored = sampler.compute_logprobs(text).result()[1:]
    trained = final.loss_fn_outputs[0]["logprobs"].tolist()
    params = tinker.SamplingParams(max_tokens=48, temperature=0.0, stop=renderer.get_stop_sequences())
    sequence = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0]
    message, end = renderer.parse_response(sequence.tokens)
    return {
        "losses": losses[1:],
        "gap": max(abs(a - b) for a, b in zip(scored, trained, strict=True)),
        "stopped": sequence.stop_reason,
        "end": end,
        "answer": renderers.get_text_content(message),
    }


main()
