"""Every official name is here, with the official fields and defaults, and costs nothing until it is used."""

import dataclasses
import doctest
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex.types as t
import tinkex.wire

OFFICIAL = json.loads((Path(__file__).parents[1] / "golden" / "types-0.36.0.json").read_text())

# Fields that ours may lack a word about, and why.
LOOSER = {
    ("CreateSessionRequest", "tags"), ("CreateSessionRequest", "user_metadata"),
    ("CreateSessionRequest", "sdk_version"),  # old clients may be silent about anything
    ("LoadWeightsRequest", "optimizer"), ("TelemetrySendRequest", "process_uuid"),
    ("TelemetryBatch", "process_uuid"), ("RequestFailedResponse", "category"),
    ("HealthResponse", "status"), ("TelemetryResponse", "status"),  # there is but one
    ("SessionStartEvent", "event"), ("SessionEndEvent", "event"), ("UnhandledExceptionEvent", "event"),
}  # fmt: skip


def fields_of(cls):
    """A class's fields: "required", or the default; None for both where it is a plain dataclass."""
    if hasattr(cls, "model_fields"):
        return {
            name: "required" if f.is_required() else f.get_default(call_default_factory=True)
            for name, f in cls.model_fields.items()
        }
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            f.name: "required" if f.default is missing and f.default_factory is missing else f.default
            for f in dataclasses.fields(cls)
        }
    return dict.fromkeys(inspect.signature(cls).parameters, ...)


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_official_name(name):
    cls = getattr(t, name)
    assert name in t.__all__
    if not OFFICIAL[name]:
        return
    ours = fields_of(cls)
    for field, default in OFFICIAL[name].items():
        if (name, field) == ("SampleRequest", "type"):
            continue  # what it is, is said by its class; the codec writes it
        assert field in ours, f"{name} lacks {field}"
        mine = ours[field]
        mine = mine.model_dump() if hasattr(mine, "model_dump") else mine
        if (name, field) in LOOSER or dataclasses.is_dataclass(cls) or mine is ...:
            continue
        assert mine == default, f"{name}.{field}"


@pytest.mark.parametrize("name", ["AdamParams", "LoraConfig", "SamplingParams"])
def test_the_defaults_of_what_users_build_most(name):
    """AdamW's are the wire's, not PyTorch's."""
    extensions = 8 if name == "SamplingParams" else 0
    ours = fields_of(getattr(t, name))
    assert len(ours) == len(OFFICIAL[name]) + extensions
    assert {field: ours[field] for field in OFFICIAL[name]} == OFFICIAL[name]


def test_names_load_on_first_use():
    code = """if True:
        import sys
        import tinkex.types as t
        heavy = {"numpy", "pydantic", "google.protobuf", "torch"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        t.RequestErrorCategory
        assert not heavy & set(sys.modules)
        t.SamplingParams
        assert not heavy & set(sys.modules)
        t.Datum
        assert "numpy" in sys.modules and "pydantic" not in sys.modules
        t.Checkpoint
        assert "pydantic" in sys.modules and "torch" not in sys.modules
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'SamplingParam'"):
        t.SamplingParam
    assert "SamplingParams" in dir(t)


def modules(package):
    return [f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__)]


@pytest.mark.parametrize("name", [*modules(t), *modules(tinkex.wire), "tinkex.errors"])
def test_examples_in_docstrings_are_true(name):
    if not name.endswith("_pb2"):
        assert doctest.testmod(importlib.import_module(name)).failed == 0
