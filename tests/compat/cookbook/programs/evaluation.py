"""Asks a model questions through the cookbook's adapter for inspect-ai, for two answers each.

python evaluation.py BASE_MODEL RENDERER TEMPERATURE QUESTIONS.json LOG_DIRECTORY

QUESTIONS.json is a list of {"input", "target"}. One line of JSON: the answers, and what was counted.
"""

import json
import sys
from pathlib import Path

import inspect_ai
import tinker
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, Model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from tinker_cookbook.eval.inspect_utils import InspectAPIFromTinkerSampling

model, renderer, temperature, questions, logs = sys.argv[1:]
samples = [Sample(**row) for row in json.loads(Path(questions).read_text())]
adapter = InspectAPIFromTinkerSampling(
    renderer_name=renderer,
    model_name=model,
    sampling_client=tinker.ServiceClient().create_sampling_client(base_model=model),
)
(log,) = inspect_ai.eval(
    inspect_ai.Task(dataset=MemoryDataset(samples), solver=generate(), scorer=includes()),
    model=Model(
        adapter, GenerateConfig(num_choices=2, max_tokens=12, temperature=float(temperature), seed=3)
    ),
    log_dir=logs,
    display="none",
)
assert log.status == "success", log.error
assert log.samples is not None
assert log.results is not None
outputs = [sample.output for sample in log.samples]
used = [output.usage for output in outputs if output.usage]
(total,) = log.stats.model_usage.values()
print(
    json.dumps(
        {
            "answers": [[choice.message.text for choice in output.choices] for output in outputs],
            "used": [[usage.input_tokens, usage.output_tokens] for usage in used],
            "total": [total.input_tokens, total.output_tokens, total.total_tokens],
            "accuracy": log.results.scores[0].metrics["accuracy"].value,
        }
    )
)
