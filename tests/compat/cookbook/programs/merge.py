"""Merges adapters into their base models with the cookbook's own tool, and converts them for PEFT.

    python merge.py DIRECTORY...

Each directory has `base` and `adapter`, and gets `merged` and, where the tool knows how, `converted`. Prints
one line of JSON: why it did not convert, by directory. Runs where the cookbook is installed; imports nothing
of this project.
"""

import json
import sys
from pathlib import Path

from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsAdapterError

refused = {}
for name in sys.argv[1:]:
    place = Path(name)
    given = {"base_model": str(place / "base"), "adapter_path": str(place / "adapter")}
    weights.build_hf_model(**given, output_path=str(place / "merged"))
    try:
        weights.build_lora_adapter(**given, output_path=str(place / "converted"))
    except WeightsAdapterError as error:
        refused[name] = str(error)
print(json.dumps(refused))
