"""`tinkex eval`: compare base models and adapters on one set of data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tinkex.cli.output import Integer, Whole, format_option, note, show
from tinkex.models import DEFAULT


@click.command("eval")
@click.argument("models", nargs=-1, metavar="[MODEL|tinker://…]...")
@click.option("--data", help="Rows with messages (their loss), or with a question and an answer (greedy).")
@click.option("--env", help="Instead of data: arithmetic, format or python.")
@click.option("--reward", help="module:function, regex:PATTERN or program:COMMAND scores the answers.")
@click.option("--limit", default=200, show_default=True, type=Whole(1), help="Rows, or problems.")
@click.option("--max-tokens", default=128, show_default=True, type=Whole(1), help="Tokens of an answer.")
@click.option("--skip-bad", is_flag=True, help="Leave out rows that cannot be used.")
@click.option("--seed", default=0, type=Integer(), help="Of an environment's problems.")
@click.option(
    "--answers", type=click.Path(path_type=Path, dir_okay=False), help="Write all answers there (JSONL)."
)
@format_option
def evaluate(models: tuple[str, ...], answers: Path | None, **more: Any) -> None:
    """Compare base models and adapters: the loss of known answers, or how many of their own are right.

    \b
    tinkex eval MODEL tinker://RUN/sampler_weights/final --data held_out.jsonl
    tinkex eval --env arithmetic
    """
    from tinkex.recipes.evaluation import EvalConfig, evaluate_models

    scores = evaluate_models(EvalConfig(models=models or (DEFAULT,), **more))
    if answers is not None:
        rows = [{"model": score.model, **each} for score in scores for each in score.answers]
        answers.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        note(f"answers: {answers}")
    table = [{key: value for key, value in asdict(score).items() if key != "answers"} for score in scores]
    known = [key for key in table[0] if any(row[key] is not None for row in table)]
    shown = [
        {key: f"{row[key]:.4g}" if isinstance(row[key], float) else row[key] for key in known}
        for row in table
    ]
    show(table, f"{len(scores)} models on {more['data'] or more['env']}", shown)
