"""`tinkex init`: a project folder with a commented script, sample data and a test."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from tinkex.models import DEFAULT

_FILES = ("README.md", "train.py", "test_data.py")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model", default=DEFAULT, show_default=True, help="The base model of the script.")
def init(directory: Path, model: str) -> None:
    """Make a project folder: a script to change, sample data and a test.

    \b
    tinkex init my-model
    cd my-model && python train.py

    It overwrites no existing file.
    """
    there = [name for name in (*_FILES, "data") if (directory / name).exists()]
    if there:
        raise click.ClickException(
            f"{directory} has {', '.join(there)} already: give a directory that has not, such as "
            f"`tinkex init {directory}-2`"
        )
    (directory / "data").mkdir(parents=True)
    for name in _FILES:
        text = files("tinkex.cli").joinpath("project", f"{name}.template").read_text(encoding="utf-8")
        content = text.format(model=model, name=directory.resolve().name) if name != "test_data.py" else text
        (directory / name).write_text(content, encoding="utf-8")
    sample = files("tinkex.demo").joinpath("pirate.jsonl").read_text(encoding="utf-8")
    (directory / "data" / "train.jsonl").write_text(sample, encoding="utf-8")
    (directory / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    click.echo(f"{directory} is ready. Next:\n\n  cd {directory}\n  python train.py")
