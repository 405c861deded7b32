"""`import tinker` resolved to tinkex: programs written for the official package run without it.

    python -m tinkex.compat train.py --steps 10        # or: -m tinker_cookbook.recipes.sl_loop …
    import tinkex.compat; tinkex.compat.install()      # the same, from inside a program

Resolves `tinker` and its submodules in this process only: a spawned worker calls `install()` at the top of
its module. The error for a private part of the official package says what to use instead.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["OFFICIAL_VERSION", "install"]

# `tinker.__version__`: the official release whose names and defaults these are.
OFFICIAL_VERSION = "0.36.0"

_PUBLIC = "tinker.lib.public_interfaces"
# official module -> our module that has its names; "" for one that only contains others
_MODULES = {
    "tinker": "tinkex",
    "tinker._exceptions": "tinkex.errors",
    "tinker.auth": "tinkex.auth",
    "tinker.types": "tinkex.types",
    "tinker.lib": "",
    "tinker.lib.retry_handler": "tinkex.client.retry",
    _PUBLIC: "tinkex",
    f"{_PUBLIC}.admin_client": "tinkex.client.admin",
    f"{_PUBLIC}.api_future": "tinkex.client.future",
    f"{_PUBLIC}.custom_loss": "tinkex",
    f"{_PUBLIC}.rest_client": "tinkex.client.rest",
    f"{_PUBLIC}.sampling_client": "tinkex.client.sampling",
    f"{_PUBLIC}.service_client": "tinkex.embedded",
    f"{_PUBLIC}.training_client": "tinkex.client.training",
}
# modules of tinker.types that are not named after a type
_TYPE_MODULES = {"billing_usage_request", "current_checkpoint_storage_usage_request", "optimizer", "shared"}
_SAME = {"AwaitableConcurrentFuture": "APIFuture"}
_USAGE = """usage: python -m tinkex.compat SCRIPT.py [ARGUMENTS]
       python -m tinkex.compat -m MODULE [ARGUMENTS]

Runs a program written for the official tinker package on tinkex: `import tinker` gives tinkex,
whether or not the official package is installed. With neither TINKER_API_KEY nor TINKER_BASE_URL set, it
trains and samples inside the process.
"""


def install() -> None:
    """Resolve `import tinker` to tinkex in this process. Calling it again does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "tinker" in sys.modules:
        raise ImportError(
            "the official tinker package is already imported: call tinkex.compat.install() before"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds `tinker` and its submodules: empty modules that look names up in ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "tinker" and not fullname.startswith("tinker."):
            return None
        if _source(fullname) is None:
            raise ModuleNotFoundError(
                f"tinkex replaces tinker {OFFICIAL_VERSION} here and has no {fullname!r}: "
                "its names are in tinker, tinker.types, tinker.auth and tinker.lib.public_interfaces",
                name=fullname,
            )
        return ModuleSpec(fullname, self, origin="tinkex.compat", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "tinker":
            module.__dict__["__version__"] = OFFICIAL_VERSION
            module.__dict__["__title__"] = "tinker"


class _Alias(ModuleType):
    """A module with the names of ours. Patching one, as tests do, changes only this module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        if source := _source(self.__name__):
            found = getattr(importlib.import_module(source), _SAME.get(name, name), None)
            if found is not None and not isinstance(found, ModuleType):
                return found
        try:
            return importlib.import_module(f"{self.__name__}.{name}")
        except ModuleNotFoundError:
            pass
        raise AttributeError(f"tinkex has no counterpart of {self.__name__}.{name}")

    def __dir__(self) -> list[str]:
        source = _source(self.__name__)
        module = importlib.import_module(source) if source else self
        return sorted({*super().__dir__(), *getattr(module, "__all__", dir(module) if source else ())})


def _source(module: str) -> str | None:
    """Our module for an official one; None if there is no such module."""
    parent, _, last = module.rpartition(".")
    if parent == "tinker.types" and _is_type_module(last):
        return "tinkex.types"
    return _MODULES.get(module)


def _is_type_module(name: str) -> bool:
    """True for `tensor_data`, because there is a TensorData."""
    from tinkex import types

    return name in _TYPE_MODULES or name.replace("_", "") in {known.lower() for known in types.__all__}


def main(arguments: list[str]) -> None:
    """Run a program with `tinker` resolved to tinkex."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        sys.stdout.write(_USAGE)
        sys.exit(0 if arguments and arguments[0] != "-m" else 2)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not sys.flags.safe_path:
            sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"python -m tinkex.compat: no such script: {script}")
    sys.argv = arguments
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":  # this module is a second copy of the one that programs import
    importlib.import_module("tinkex.compat").main(sys.argv[1:])
