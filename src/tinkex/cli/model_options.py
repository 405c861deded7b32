"""What follows a model in `--model NAME=PLACE,tensor=K,trainers=M,data=D,…`: where its parts run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.protocol import Placement

_OPTION = re.compile(r",([a-z]+)=([^,=]*)$")


def split_options(spec: str) -> tuple[str, dict[str, str]]:
    """A model without its options, and those.

    >>> split_options("big=/models/big,trainers=2,samplers=1-4")
    ('big=/models/big', {'trainers': '2', 'samplers': '1-4'})
    """
    options: dict[str, str] = {}
    while found := _OPTION.search(spec):
        options = {found[1]: found[2], **options}
        spec = spec[: found.start()]
    return spec, options


def _whole(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise ValueError("a whole number from 1 to 4096")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    bounds = _whole(least), _whole(most or least)
    if bounds[0] > bounds[1]:
        raise ValueError("N or N-M, with N at most M")
    return bounds


def _ranks(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 16:
        raise ValueError("a whole number from 1 to 16")
    return int(text)


def _gpus(text: str) -> float:
    try:
        gpus = float(text)
    except ValueError:
        gpus = math.nan
    if not 0 <= gpus <= 64 or (gpus > 1 and gpus != int(gpus)):
        raise ValueError("0, a part of one GPU such as 0.5, or a whole number")
    return gpus


_READ: dict[str, Callable[[str], Any]] = {
    "tensor": _ranks, "trainers": _whole, "data": _whole, "samplers": _range, "gpus": _gpus
}  # fmt: skip


def read_model_options(spec: str, options: Mapping[str, str], cluster: str) -> tuple[int, Placement | None]:
    """Over how many GPUs a model is, and where it runs on a cluster; None without one."""
    from tinkex.engine.protocol import Placement

    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in _READ:
            raise InvalidInputError(
                f"--model {spec!r}: there is no option {name!r}; allowed: {', '.join(_READ)}"
            )
        try:
            values[name] = _READ[name](text)
        except ValueError as error:
            raise InvalidInputError(f"--model {spec!r}: {name}={text} must be {error}") from None
    tensor = values.pop("tensor", 1)
    if not cluster:
        if values:
            raise InvalidInputError(
                f"--model {spec!r}: {next(iter(values))}= needs --cluster auto or an address"
            )
        return tensor, None
    if tensor > 1 and values.get("data", 1) > 1:
        raise InvalidInputError(f"--model {spec!r}: data= and tensor= do not go together yet; leave one out")
    if tensor > 1 and 0 < (gpus := values.get("gpus", 0)) != tensor:
        raise InvalidInputError(
            f"--model {spec!r}: tensor={tensor} needs gpus={tensor}, and gpus is {gpus:g}"
        )
    least, most = values.pop("samplers", (1, 1))
    return tensor, Placement(cluster, samplers=least, max_samplers=most, **values)
