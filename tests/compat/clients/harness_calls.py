"""lm-eval on a task of three questions: scores of answers by completions, by transformers, and a chat."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lm_eval
import lm_eval.tasks
from report import MODEL, done, say

CHOICES = """task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
"""
ANSWERS = """task: spoken
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def main(directory: Path, model: str) -> None:
    questions = [
        {"question": f"The capital of {land}?", "choices": [" Bern", " Rome", " Oslo"], "answer": i}
        for i, land in enumerate(["Switzerland", "Italy", "Norway"])
    ]
    data = directory / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    for name, text in (("capitals", CHOICES), ("spoken", ANSWERS)):
        (directory / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    tasks = lm_eval.tasks.TaskManager(include_path=str(directory))
    url = os.environ["OPENAI_BASE_URL"]
    common = f"model={MODEL},tokenizer={model},num_concurrent=1,max_retries=1,max_length=512"

    def scores(kind: str, arguments: str, task: str, **more) -> list:
        done = lm_eval.simple_evaluate(kind, model_args=arguments, tasks=[task], task_manager=tasks, **more)
        return [sample["filtered_resps"] for sample in done["samples"][task]]

    ours = scores(
        "local-completions", f"{common},base_url={url}/completions,tokenized_requests=False", "capitals"
    )
    tokens = scores("local-completions", f"{common},base_url={url}/completions", "capitals")
    theirs = scores("hf", f"pretrained={model},dtype=float32,max_length=512", "capitals", device="cpu")
    chat = scores(
        "local-chat-completions",
        f"{common},base_url={url}/chat/completions",
        "spoken",
        apply_chat_template=True,
    )
    say("lm-eval", ours=ours, tokens=tokens, theirs=theirs, spoken=[len(answer[0]) for answer in chat])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    done()
