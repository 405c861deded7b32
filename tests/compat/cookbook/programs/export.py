"""Trains a few steps, then takes the weights out with the cookbook's own tools.

    python export.py BASE_MODEL TRAIN_UNEMBED OUTPUT_DIRECTORY

Prints one line of JSON: the server's own logprobs of a text, and where the adapter and the merged model are.
Runs where the cookbook is installed; imports nothing of this project.
"""

import json
import sys
from pathlib import Path

import tinker
from tinker_cookbook import weights

base_model, train_unembed, output = sys.argv[1], sys.argv[2] == "True", Path(sys.argv[3])
TOKENS = [7, 90, 310, 42, 500, 61, 61, 300, 12, 480, 95, 33]

service = tinker.ServiceClient()
run = service.create_lora_training_client(base_model, rank=8, train_unembed=train_unembed, seed=3)
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
)
for _ in range(3):
    run.forward_backward([datum], "cross_entropy")
    run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
logprobs = (
    run.save_weights_and_get_sampling_client().compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
)

state = run.save_state("done").result().path
adapter = weights.download(tinker_path=state, output_dir=str(output / "adapter"))
weights.build_lora_adapter(base_model=base_model, adapter_path=adapter, output_path=str(output / "peft"))
weights.build_hf_model(base_model=base_model, adapter_path=adapter, output_path=str(output / "merged"))
print(json.dumps({"tokens": TOKENS, "logprobs": logprobs[1:]}))
