"""Replies with tool calls as the cookbook renders them for each family: our parsers read the same calls."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.compat.environments import interpreter
from tests.engine.tiny import tiny_tokenizer
from tinkex.server.openai.chat_formats import DEEPSEEK, GLM, HARMONY, HERMES, KIMI, QWEN_XML, parser_of

PROGRAM = Path(__file__).parent / "programs" / "tool_replies.py"
FORMATS = {
    "qwen3": HERMES, "qwen3_instruct": HERMES, "qwen3_5": QWEN_XML, "deepseekv3": DEEPSEEK,
    "deepseekv3_thinking": DEEPSEEK, "kimi_k2": KIMI, "kimi_k25": KIMI, "kimi_k26": KIMI,
    "glm5_3_high_reasoning": GLM, "nemotron3": QWEN_XML, "gpt_oss_medium_reasoning": HARMONY,
}  # fmt: skip
STOPS = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|observation|>")  # the end of a reply, which is in no text
TOOLS = [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}, {"name": "noon"}]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    command = [str(interpreter("cookbook")), str(PROGRAM), str(tokenizer)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "HF_HUB_OFFLINE": "1"
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=tokenizer
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sheets = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {sheet["renderer"]: sheet for sheet in sheets}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_back(rendered: dict[str, dict], name: str) -> None:
    sheet = rendered[name]
    assert "error" not in sheet, sheet["error"]
    reply = sheet["reply"]
    for stop in STOPS:
        reply = reply.removesuffix(stop)
    opened = reply.lstrip().startswith("</think>")  # by the prompt
    for size in (len(reply), 3):
        parser = parser_of(FORMATS[name], thinking=opened, tools=TOOLS)
        parts = [part for i in range(0, len(reply), size) for part in parser.add(reply[i : i + size])]
        parts += parser.finish()
        calls = [[part.call.name, json.loads(part.call.arguments)] for part in parts if part.call]
        assert calls == sheet["calls"]
        assert "".join(part.text for part in parts if part.kind == "text").strip() == "I look."
        assert not "".join(part.text for part in parts if part.kind == "reasoning").strip()
