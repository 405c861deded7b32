"""Writes replies with tool calls as the cookbook's renderers of each family do. Needs no server.

    python tool_replies.py TOKENIZER

Prints a line of JSON for each renderer: the text that a model would have to write, special tokens included.
The tokenizer is of bytes, with every family's special tokens added. Imports nothing of this project.
"""

import json
import sys
import traceback

from tinker_cookbook import renderers
from transformers import AutoTokenizer

NAMES = [
    "qwen3", "qwen3_instruct", "qwen3_5", "deepseekv3", "deepseekv3_thinking", "kimi_k2", "kimi_k25",
    "kimi_k26", "glm5_3_high_reasoning", "nemotron3", "gpt_oss_medium_reasoning",
]  # fmt: skip
WORDS = """
<think> </think> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|start|> <|end|> <|message|>
<|channel|> <|call|> <|return|> <|constrain|> <|system|> <|user|> <|assistant|> <|observation|> <|eot_id|>
<|start_header_id|> <|end_header_id|> <|begin_of_text|> <|end_of_text|> <|python_tag|> <｜System｜> <｜User｜>
<｜Assistant｜> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|>
<|tool_call_argument_begin|> <tool_call> </tool_call>
"""
CALLS = [("weather", {"city": "Bern", "days": 2, "exact": True}), ("noon", {})]
ASKED: list[renderers.Message] = [{"role": "user", "content": "What is the weather?"}]


def reply(name: str, tokenizer: object, calls: list[tuple[str, dict[str, object]]]) -> str:
    renderer = renderers.get_renderer(name, tokenizer)
    written = [
        renderers.ToolCall(
            function=renderers.ToolCall.FunctionBody(name=tool, arguments=json.dumps(given)),
            id=f"functions.{tool}:{i}",
        )
        for i, (tool, given) in enumerate(calls)
    ]
    answer: renderers.Message = {"role": "assistant", "content": "I look.", "tool_calls": written}
    last = renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE
    given, weights = renderer.build_supervised_example([*ASKED, answer], train_on_what=last)
    tokens = [token for token, weight in zip(given.to_ints(), weights.tolist(), strict=True) if weight]
    return tokenizer.decode(tokens)  # type: ignore[attr-defined]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS.split()})
    for name in NAMES:
        facts: dict[str, object] = {"renderer": name, "calls": CALLS}
        try:
            facts["reply"] = reply(name, tokenizer, CALLS)
        except Exception:
            facts["error"] = traceback.format_exc()[-1500:]
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
