"""An evaluation by inspect-ai through the cookbook's adapter: what it reads is what the model says.

At temperature 0 both answers to a question are those of transformers, and every token of prompt and answers
is counted; at temperature 1 the two differ, seed or not. The cookbook's own evaluation runs as it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.compat.cookbook.kitchen import PACKAGE, Kitchen

PROGRAM = Path(__file__).parent / "programs" / "evaluation.py"
MODEL, RENDERER = "Qwen/Qwen3-8B", "qwen3"
QUESTIONS = ["Where is the red boat?", "What is in the garden, and who lives in the house by the river?"]
LENGTH = 12  # tokens of an answer at most, as the program asks for


def test_an_evaluation(kitchen: Kitchen, tmp_path: Path) -> None:
    check_evaluation(kitchen, tmp_path)


def test_an_evaluation_on_our_sdk(ours: Kitchen, tmp_path: Path) -> None:
    check_evaluation(ours, tmp_path)


def test_the_cookbooks_example_with_a_judge(kitchen: Kitchen, tmp_path: Path) -> None:
    check_example(kitchen, tmp_path)


def test_the_cookbooks_example_on_our_sdk(ours: Kitchen, tmp_path: Path) -> None:
    check_example(ours, tmp_path)


def check_evaluation(kitchen: Kitchen, directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(kitchen.hub / MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(kitchen.hub / MODEL, dtype=torch.float32)
    read, said = zip(*(_answer(model, tokenizer, question) for question in QUESTIONS), strict=True)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]

    greedy = _evaluate(kitchen, directory, 0.0, targets=[texts[0], "nothing of the kind"])
    assert greedy["answers"] == [[text, text] for text in texts]
    assert greedy["accuracy"] == 0.5
    assert greedy["used"] == [[read[i], 2 * len(said[i])] for i in range(len(QUESTIONS))]
    prompts, answers = sum(read), 2 * sum(map(len, said))
    assert greedy["total"] == [prompts, answers, prompts + answers]

    drawn = _evaluate(kitchen, directory, 1.0, targets=["anything", "else"])
    assert all(first != second for first, second in drawn["answers"])
    assert all(2 <= count <= 2 * LENGTH for _, count in drawn["used"])


def check_example(kitchen: Kitchen, directory: Path) -> None:
    """It answers two questions twice and judges the first of each: our judge is at a loss for a grade."""
    options = {
        "tasks": f"{PACKAGE}.eval.custom_inspect_task:example_lm_as_judge", "model_name": "Qwen/Qwen3.5-9B",
        "max_tokens": LENGTH, "num_choices": 2, "log_dir": directory / "logs",
    }  # fmt: skip
    given = [f"{option}={value}" for option, value in options.items()]
    said = kitchen.run(directory, "-m", f"{PACKAGE}.eval.run_inspect_evals", *given).said
    (counted,) = set(re.findall(r"\[I: ([\d,]+), O: ([\d,]+)\]", said))
    read, answered = (int(count.replace(",", "")) for count in counted)
    assert read > 4 * LENGTH, "two questions, and two prompts for the judge with an answer in each"
    assert answered >= 6
    assert "qa_dataset/accuracy: " in said


def _answer(model: Any, tokenizer: Any, question: str) -> tuple[int, list[int]]:
    """How many tokens the prompt has, and the tokens of the likeliest answer, its end included."""
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    padding = list(range(len(tokenizer), model.config.vocab_size))  # of the vocabulary: it is never said
    answered = model.generate(prompt, do_sample=False, max_new_tokens=LENGTH, suppress_tokens=padding)
    return prompt.shape[1], answered[0, prompt.shape[1] :].tolist()


def _evaluate(kitchen: Kitchen, directory: Path, temperature: float, targets: list[str]) -> dict[str, Any]:
    questions = directory / "questions.json"
    rows = [
        {"input": question, "target": target} for question, target in zip(QUESTIONS, targets, strict=True)
    ]
    questions.write_text(json.dumps(rows))
    given = (MODEL, RENDERER, str(temperature), str(questions), str(directory / "logs"))
    return json.loads(kitchen.run(directory, str(PROGRAM), *given).said.splitlines()[-1])
