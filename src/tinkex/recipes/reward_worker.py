"""Computes rewards for `rewards.py`: `python reward_worker.py SPEC`, a JSON object a line, in and out.

It is run by path, so that it starts quickly and finds modules in the user's working directory. Output of the
user's function goes to stderr.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load(spec: str) -> Callable[[str, Mapping[str, Any]], Any]:
    kind, _, rest = spec.partition(":")
    if kind == "regex":
        pattern = re.compile(rest, re.DOTALL)
        return lambda text, _: float(pattern.search(text) is not None)
    sys.path[0] = os.getcwd()  # not this file's folder
    function = vars(importlib.import_module(kind))[rest]
    if not callable(function):
        raise TypeError(f"{rest} is not a function")
    return function


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text must not be read as an answer
    score: Callable[[str, Mapping[str, Any]], Any] | None = None
    problem = ""
    try:
        score = load(sys.argv[1])
    except Exception as error:  # a user's module may raise anything
        problem = f"{type(error).__name__}: {error}"
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if score is None:
                answer = {"error": problem}
            elif question["check_only"]:
                answer = {"reward": 0.0}
            else:
                answer = {"reward": float(score(question["text"], question["row"]))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
