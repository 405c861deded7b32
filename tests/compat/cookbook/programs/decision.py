"""Asks the cookbook how likely each choice of a question is; one line of JSON with what it asked.

python decision.py BASE_MODEL RENDERER
"""

import asyncio
import json
import sys

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.recipes.decisions import Decision, DecisionRenderer, sample_decision
from tinker_cookbook.tokenizer_utils import get_tokenizer

model, renderer = sys.argv[1:]
question = Decision(
    "Where is the red boat?", [("house", "by the house"), ("river", ""), ("garden", "in the garden")]
)
asked = DecisionRenderer(renderers.get_renderer(renderer, get_tokenizer(model))).render(question)
sampler = tinker.ServiceClient().create_sampling_client(base_model=model)
said = asyncio.run(sample_decision(sampler, asked))
print(
    json.dumps(
        {
            "probabilities": said,
            "tokens": list(asked.tokens),
            "position": asked.choice_pos,
            "answers": [asked.label_tokens[label] for label in asked.labels],
        }
    )
)
