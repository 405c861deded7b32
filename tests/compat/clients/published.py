"""Official SDK: train a little and save a sampler's weights, for other clients to sample from."""

from __future__ import annotations

import tinker
from report import MODEL, PROMPT, done, say

service = tinker.ServiceClient()
run = service.create_lora_training_client(MODEL, rank=2, seed=1)
ids = tinker.ModelInput.from_ints(PROMPT[:4])
datum = tinker.Datum(model_input=ids, loss_fn_inputs={"target_tokens": [5, 6, 7, 8]})
run.forward_backward([datum], "cross_entropy").result()
run.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
path = run.save_weights_for_sampler("chat").result().path
prompt = tinker.ModelInput.from_ints(run.get_tokenizer().encode("Once upon"))
greedy = tinker.SamplingParams(max_tokens=12, temperature=0.0)
sampled = run.create_sampling_client(path).sample(prompt, 1, greedy).result().sequences[0]
text = run.get_tokenizer().decode(sampled.tokens, skip_special_tokens=True)
say("published", path=path, text=text, logprobs=sampled.logprobs)
done()
