"""Saves a fresh adapter whose seed is known, so that several runs can start from the same weights.

python start.py BASE_MODEL RANK RENDERER
"""

import sys

import tinker

model, rank, renderer = sys.argv[1:]
service = tinker.ServiceClient(user_metadata={"renderer_name": renderer})
run = service.create_lora_training_client(
    model, int(rank), seed=11, user_metadata={"renderer_name": renderer}
)
print(run.save_state("start").result().path)
