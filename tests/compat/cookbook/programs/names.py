"""Prints a line of JSON with the models that the cookbook names: defaults of its programs, and its list.

    python names.py

A default is a field `model_name` with a string, in any module of the package. Runs where the cookbook is
installed; imports nothing of this project.
"""

import ast
import json
from pathlib import Path

import tinker_cookbook
from tinker_cookbook import model_info

defaults = [
    node.value.value
    for file in sorted(Path(tinker_cookbook.__file__).parent.rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.AnnAssign)
    and isinstance(node.target, ast.Name)
    and node.target.id == "model_name"
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
    and "/" in node.value.value  # the others are no base models
]
lists = [getattr(model_info, name)() for name in dir(model_info) if name.endswith("_info")]
listed = [f"{about.organization}/{name}" for models in lists for name, about in models.items()]
print(json.dumps({"defaults": defaults, "listed": listed}))
