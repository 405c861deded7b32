"""`import tinker` resolved to tinkex: every official name and module that programs use, each in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The names that tinker.__all__ of 0.36.0 holds and programs use.
TOP = """
TrainingClient ServiceClient SamplingClient RestClient AdminClient APIFuture AdamOptimizerConfig
AdamParams DimuonOptimizerConfig DimuonParams OptimParams Checkpoint CheckpointType Datum DmelChunk
EncodedTextChunk ForwardBackwardOutput SampledProvenanceSpan LoraConfig ModelID ModelInput
ModelInputChunk OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath PromptProvenanceSpan
SampledSequence SampleRequest SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun
TinkerError APIError APIStatusError APITimeoutError APIConnectionError APIResponseValidationError
RequestFailedError BadRequestError AuthenticationError BillingError PermissionDeniedError NotFoundError
ConflictError UnprocessableEntityError RateLimitError InternalServerError ExperimentalWarning LossHandle
PerDatumLossFn auth types
"""


def run(
    code: str, *arguments: str, directory: Path, module: bool = False
) -> subprocess.CompletedProcess[str]:
    (directory / "program.py").write_text(code)
    command = [sys.executable, "-m", "tinkex.compat", *(["-m", "program"] if module else ["program.py"])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    return subprocess.run(
        [*command, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )


def test_every_official_name_is_there(tmp_path: Path) -> None:
    code = f"""
import tinker
missing = [name for name in {TOP.split()!r} if not hasattr(tinker, name)]
print(missing, tinker.__version__)
"""
    done = run(code, directory=tmp_path)
    assert done.stdout.split("\n")[0] == "[] 0.36.0", done.stderr


def test_the_modules_that_programs_import(tmp_path: Path) -> None:
    code = """
import sys
import tinker
import tinkex
from tinker import types
from tinker.lib.public_interfaces import APIFuture, AwaitableConcurrentFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.retry_handler import RetryConfig
from tinker.types.image_chunk import ImageChunk
from tinker.types.tensor_data import TensorData

assert types.TensorData is TensorData is tinkex.TensorData
assert APIFuture is AwaitableConcurrentFuture is tinkex.APIFuture
assert RestClient is tinker.RestClient and RetryConfig is tinkex.RetryConfig
assert ImageChunk is tinker.types.ImageChunk
ours = [module.__spec__.origin for name, module in sys.modules.items() if name.split(".")[0] == "tinker"]
print("same", set(ours))
"""
    done = run(code, directory=tmp_path)
    assert done.stdout == "same {'tinkex.compat'}\n", done.stderr


@pytest.mark.parametrize("module", [False, True])
def test_a_program_sees_its_own_arguments_and_neighbours(tmp_path: Path, module: bool) -> None:
    (tmp_path / "neighbour.py").write_text("import tinker\nrank = tinker.LoraConfig(rank=4).rank\n")
    done = run(
        "import sys\nimport neighbour\nprint(neighbour.rank, sys.argv[1:], __name__)",
        "--steps", "3", directory=tmp_path, module=module,
    )  # fmt: skip
    assert done.stdout == "4 ['--steps', '3'] __main__\n", done.stderr


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import tinker.lib.internal_client_holder", "has no 'tinker.lib.internal_client_holder'"),
        ("from tinker.types.tensor_date import TensorData", "has no 'tinker.types.tensor_date'"),
        ("import tinker; tinker.SamplingParms", "no counterpart of tinker.SamplingParms"),
        ("from tinker import nothing", "cannot import name 'nothing'"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, code: str, says: str) -> None:
    done = run(code, directory=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]


def test_patching_a_name_reaches_the_program(tmp_path: Path) -> None:
    """The cookbook's tests replace `tinker.ServiceClient`; ours must stay as it is."""
    code = """
from unittest import mock
import tinker, tinkex
with mock.patch("tinker.ServiceClient") as fake:
    assert tinker.ServiceClient is fake and tinkex.ServiceClient is not fake
assert tinker.ServiceClient is tinkex.ServiceClient
print("restored")
"""
    assert run(code, directory=tmp_path).stdout == "restored\n"


def test_help_a_missing_script_and_a_failing_one(tmp_path: Path) -> None:
    def compat(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tinkex.compat", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert "python -m tinkex.compat SCRIPT.py" in compat("--help").stdout
    assert compat().returncode == 2
    missing = compat("nowhere.py")
    assert (missing.returncode, missing.stderr) == (
        1,
        "python -m tinkex.compat: no such script: nowhere.py\n",
    )
    assert run("raise SystemExit(7)", directory=tmp_path).returncode == 7


def test_the_official_package_is_not_replaced_under_a_program_that_has_it() -> None:
    code = """
import sys, types
sys.modules["tinker"] = types.ModuleType("tinker")
import tinkex.compat
try:
    tinkex.compat.install()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "already imported" in done.stdout
