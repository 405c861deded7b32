"""Which of the models that the cookbook names load here, by the configurations that released ones have.

docs/models.md says how many; a model that loads now, or no longer, fails this until the page is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.compat.cookbook.kitchen import OFFICIAL, Kitchen
from tests.compat.environments import ROOT, interpreter
from tests.engine.released_shapes import MODELS as SHAPES
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.load import outline
from tinkex.errors import InvalidInputError

pytestmark = pytest.mark.ci

PROGRAM = Path(__file__).parent / "programs" / "names.py"
# How names of models that do not load begin, their configuration in transformers, and what we say of them.
NOT_LOADED: dict[str, tuple[Callable[[], Any], str]] = {
    "deepseek-ai/DeepSeek-V4": (transformers.DeepseekV4Config, "keys that are not of its own tokens"),
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL": (
        transformers.NemotronH_Omni_Reasoning_V3_Config, "has no causal language model of it",
    ),
    "thinkingmachines/Inkling": (transformers.InklingConfig, "has no causal language model of it"),
    "zai-org/GLM-5.3-Flash": (transformers.Glm5NextConfig, "has no causal language model of it"),
}  # fmt: skip
# A model has the shape of the one of the same name without some words, or of this one (Ultra but for widths).
SAME_SHAPE = {
    "Qwen3.6-27B": "Qwen3.5-27B",
    "Qwen3.8-27B": "Qwen3.5-27B",
    "Qwen3.6-35B-A3B": "Qwen3.5-35B-A3B",
    "Kimi-K2.6": "Kimi-K2.5",
    "Llama-3.3-70B": "Llama-3.1-70B",
    "Nemotron-3-Ultra-550B-A55B": "Nemotron-3-Super-120B-A12B",
    "Nemotron-3.5-Lightning-30B-A3B": "Nemotron-3-Nano-30B-A3B",
}
VERSIONS = re.compile(r"^NVIDIA-|(-Base|-Instruct|-Instruct-2507|-Thinking|-BF16)$")


def loads(name: str, directory: Path) -> bool:
    """Whether the model of this name loads: it is built without memory, from its config.json alone."""
    if start := next((start for start in NOT_LOADED if name.startswith(start)), None):
        configuration, why = NOT_LOADED[start]
        configuration().save_pretrained(directory)
        with pytest.raises(InvalidInputError, match=why):
            outline(directory, Backend())
        return False
    shape = VERSIONS.sub("", name.partition("/")[2])
    (directory / "config.json").write_text(json.dumps(SHAPES[SAME_SHAPE.get(shape, shape)][0]))
    outline(directory, Backend())
    return True


def test_as_many_load_as_docs_say(tmp_path: Path) -> None:
    run = Kitchen(OFFICIAL, interpreter("cookbook"), tmp_path, tmp_path).run(tmp_path, str(PROGRAM))
    names = json.loads(run.said.splitlines()[-1])
    defaults, listed = [name.partition(":")[0] for name in names["defaults"]], names["listed"]
    loaded = {name for name in {*defaults, *listed} if loads(name, tmp_path)}
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    for all_of, what in ((defaults, "default models"), (listed, "models it lists")):
        count = f"{sum(name in loaded for name in all_of)} of the {len(all_of)} {what}"
        assert count in page, f"docs/models.md should say: {count}"
    unused = [start for start in NOT_LOADED if not any(name.startswith(start) for name in listed)]
    assert not unused
