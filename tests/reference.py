"""Write docs/reference.md from the code: `python -m tests.reference`.

Signatures, defaults and return types come from the classes, first sentences from their docstrings, and the
rest from reference.toml beside this file. tests/test_reference.py fails if page and code differ.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tinkex
from tinkex import types
from tinkex.types.losses import LOSSES, LossSpec
from tinkex.types.params import LOSS_NAMES

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

CLIENTS = (
    tinkex.ServiceClient, tinkex.TrainingClient, tinkex.SamplingClient, tinkex.RestClient,
    tinkex.AdminClient,
)  # fmt: skip
ANSWERS = (tinkex.APIFuture, tinkex.SampleStream)  # what clients give that has methods
CONSTRUCTED = (tinkex.ServiceClient, tinkex.RestClient, tinkex.AdminClient)  # others are made by these
BUILT = (
    tinkex.ModelInput, tinkex.Datum, tinkex.TensorData, tinkex.AdamParams, tinkex.SamplingParams,
    tinkex.LoraConfig,
)  # fmt: skip
GIVEN = (
    tinkex.ForwardBackwardOutput, tinkex.OptimStepResponse, tinkex.SampleResponse, tinkex.SampledSequence,
    tinkex.NewTokens, types.SaveWeightsResponse, types.SaveWeightsForSamplerResponse, tinkex.Checkpoint,
    tinkex.TrainingRun, types.GetServerCapabilitiesResponse, types.SupportedModel,
)  # fmt: skip
SETTINGS = (tinkex.Timeouts, tinkex.RetryConfig, tinkex.RecoveryPolicy)
# What is for ourselves, for executors, or for a codec.
INTERNAL = {
    "commit", "when_done", "set_exception", "set_result", "set_running_or_notify_cancel", "compressed", "cut",
    "model_copy", "model_dump", "model_validate", "dense_shape", "nbytes", "sound",
}  # fmt: skip
NOT_GIVEN = ("self", "unknown")  # arguments that a client does not know are a warning


def page() -> str:
    introduction, *parts = _parts()
    titles = [part[3:].partition("\n")[0] for part in parts if part.startswith("## ")]
    contents = "".join(f"- [{title}](#{title.lower().replace(' ', '-')})\n" for title in titles)
    return "\n".join((introduction, contents, *parts)).rstrip() + "\n"


def _parts() -> Iterator[str]:
    yield WORDS["introduction"]
    for kind in (*CLIENTS, *ANSWERS):
        yield f"## {kind.__name__}\n\n{_first(kind)}\n"
        if kind in CONSTRUCTED:
            yield f"`{kind.__name__}{arguments(kind.__init__)}`\n"
        yield _table(("method", "gives", "async", "what it does", "raises"), map(_method, methods(kind)))
    yield f"## Functions\n\n`render_chat{arguments(tinkex.render_chat)}`: {_first(tinkex.render_chat)}\n"
    yield "## Parameters\n\nOne name is one thing, in whatever method it is.\n"
    yield _table(("parameter", "type", "what it is"), _parameters())
    yield f"## Losses\n\n{WORDS['about_losses']}\n"
    yield _table(("loss_fn", "needs", "may have", "mind"), map(_loss, LOSS_NAMES))
    for title, kinds in (("What you build", BUILT), ("What you get", GIVEN), ("Settings", SETTINGS)):
        yield f"## {title}\n"
        for kind in kinds:
            yield f"### {kind.__name__}\n\n{_first(kind)}\n"
            yield _table(("field", "type", "default", "what it is"), _fields(kind))
            own = [] if kind in GIVEN else [each for each in methods(kind) if each[1] not in fields(kind)]
            if own:
                yield _table(("method", "gives", "what it does", "raises"), (_without_async(m) for m in own))
    yield "## Errors\n\nAll are in `tinkex.errors`; `except tinkex.TinkerError` catches every one.\n"
    yield _table(("error", "is a", "when"), map(_error, errors()))
    yield "## Environment\n"
    yield _table(("variable", "what for"), ((f"`{n}`", text) for n, text in WORDS["environment"].items()))


# -- methods ---------------------------------------------------------------------------------------------


def methods(kind: type) -> list[tuple[type, str, Any]]:
    """Its public methods and properties, in the order of the code; a twin goes with the one it is of."""
    order: dict[str, tuple[int, int]] = {}  # the class's own first, then what it inherits
    for depth, owner in enumerate(kind.__mro__):
        for n, name in enumerate(vars(owner)):
            order.setdefault(name, (depth, n))
    found = [(name, inspect.getattr_static(kind, name)) for name in dir(kind) if not name.startswith("_")]
    public = [
        (n, m) for n, m in found if n not in INTERNAL and (callable(_plain(m)) or isinstance(m, property))
    ]
    alone = [(n, m) for n, m in public if not _is_twin(kind, n)]
    return [(kind, name, _plain(member)) for name, member in sorted(alone, key=lambda each: order[each[0]])]


def _is_twin(kind: type, name: str) -> bool:
    return kind in CLIENTS and name.endswith("_async") and hasattr(kind, name.removesuffix("_async"))


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _method(each: tuple[type, str, Any]) -> tuple[str, ...]:
    kind, name, member = each
    key = f"{kind.__name__}.{name}"
    what = WORDS["what"].get(key) or _first(member)
    if isinstance(member, property):
        gives = str(inspect.signature(member.fget).return_annotation)  # type: ignore[arg-type]
        return f"`{name}`", f"`{gives}`", "", what, ""
    returned = inspect.signature(member).return_annotation
    # The standard library's futures say nothing.
    gives = "bool" if returned is inspect.Signature.empty else str(returned)
    future = re.fullmatch(r"APIFuture\[(.*)\]", gives)
    shown = f"future of `{future[1]}`" if future else f"`{gives}`"
    return f"`{name}{arguments(member)}`", shown, _awaits(kind, name), what, WORDS["raises"].get(key, "")


def _without_async(each: tuple[type, str, Any]) -> tuple[str, ...]:
    called, gives, _, what, raises = _method(each)
    return called, gives, what, raises


def _awaits(kind: type, name: str) -> str:
    twin = getattr(kind, f"{name}_async", None) if kind in CLIENTS else None
    if twin is None:
        return ""
    return "2" if str(inspect.signature(twin).return_annotation).startswith("APIFuture") else "1"


def arguments(function: Callable[..., Any]) -> str:
    """`(data, loss_fn, loss_fn_config=None)`"""
    parts: list[str] = []
    for parameter in given(function):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        has_default = parameter.default is not parameter.empty
        parts.append(f"{stars}{parameter.name}{f'={parameter.default!r}' if has_default else ''}")
    return f"({', '.join(parts)})"


def given(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a caller gives it."""
    return [p for p in inspect.signature(function).parameters.values() if p.name not in (*NOT_GIVEN, "cls")]


def _parameters() -> Iterator[tuple[str, ...]]:
    annotations: dict[str, dict[str, None]] = {}
    functions = [kind.__init__ for kind in CONSTRUCTED]
    functions += [m for kind in CLIENTS for _, _, m in methods(kind) if not isinstance(m, property)]
    for parameter in (p for function in functions for p in given(function)):
        annotations.setdefault(parameter.name, {})[str(parameter.annotation)] = None
    for name, text in WORDS["parameters"].items():
        yield f"`{name}`", " or ".join(f"`{each}`" for each in annotations[name]), text


# -- data, losses and errors -----------------------------------------------------------------------------


def _fields(kind: type) -> Iterator[tuple[str, ...]]:
    for name, text in WORDS["fields"][kind.__name__].items():
        annotation, default = fields(kind)[name]
        yield f"`{name}`", f"`{annotation}`", default, text


def fields(kind: Any) -> dict[str, tuple[str, str]]:
    """Each field's type, and its default as it is written; "" where it must be given."""
    if hasattr(kind, "model_fields"):
        return {
            name: (kind.__annotations__[name], "" if field.is_required() else f"`{field.default!r}`")
            for name, field in kind.model_fields.items()
        }
    made = (
        {f.name: f.default_factory for f in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind)
        else {}
    )
    found: dict[str, tuple[str, str]] = {}
    for parameter in inspect.signature(kind).parameters.values():
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        if made.get(parameter.name, dataclasses.MISSING) is not dataclasses.MISSING:
            default = "empty"
        elif inspect.isfunction(parameter.default):
            default = f"`{parameter.default.__name__}`"
        found[parameter.name] = str(parameter.annotation), default
    return found


def _loss(name: str) -> tuple[str, ...]:
    spec = LOSSES.get(name, LossSpec(()))
    keys = [", ".join(f"`{key}`" for key in each) for each in (spec.required, spec.optional)]
    return f"`{name}`", *keys, WORDS["losses"].get(name, "")


def errors() -> list[type[Exception]]:
    """Those that may be caught, each after what it is a kind of."""
    found = [getattr(tinkex.errors, name) for name in tinkex._NAMES["errors"].split()]
    found = [kind for kind in found if issubclass(kind, tinkex.TinkerError)]
    ours = {
        kind: [k.__name__ for k in reversed(kind.__mro__) if issubclass(k, tinkex.TinkerError)]
        for kind in found
    }
    return sorted(found, key=lambda kind: ours[kind])


def _error(kind: type[Exception]) -> tuple[str, ...]:
    return f"`{kind.__name__}`", ", ".join(f"`{base.__name__}`" for base in kind.__bases__), _first(kind)


# -- Markdown --------------------------------------------------------------------------------------------


def _first(thing: Any) -> str:
    """The first sentence, or line, of its docstring."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Columns that are empty in every row are left out."""
    lines = [tuple(titles), *map(tuple, rows)]
    kept = [n for n in range(len(lines[0])) if any(line[n] for line in lines[1:])]
    told = [" | ".join(line[n].replace("|", "\\|") for n in kept) for line in lines]
    return (
        "\n".join([f"| {told[0]} |", f"|{'---|' * len(kept)}", *(f"| {line} |" for line in told[1:])]) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
