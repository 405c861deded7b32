"""Adapters from elsewhere become checkpoints: embedded and over HTTP, from every kind of source."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import tinkex
from tests.engine.oracle import make_datum, randomise
from tests.engine.tiny import reference_model, tiny_model
from tests.server.conftest import Running
from tests.service.harness import config
from tinkex import AdamParams, ModelInput
from tinkex.engine.protocol import EngineConfig
from tinkex.errors import APIStatusError, InvalidInputError, RequestFailedError, TinkerError
from tinkex.server.serve import ServerConfig
from tinkex.service import imports
from tinkex.service.config import ServiceConfig
from tinkex.types.checkpoints import ImportWeightsRequest, UploadWeightsRequest
from tinkex.wire import ops

pytestmark = pytest.mark.slow
SECONDS = 60.0
PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"), "smollm2")


@pytest.fixture(params=["served", "embedded"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tinkex.ServiceClient]:
    if request.param == "embedded":
        monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
        with tinkex.ServiceClient(base_url="local") as client:
            yield client
        return
    settings = ServiceConfig(tmp_path / "home", {"tiny": str(base)}, engine=EngineConfig("", device="cpu"))
    running = Running(ServerConfig(settings, port=0, drain_seconds=0.1))
    with tinkex.ServiceClient(base_url=running.url, api_key="tml-ann") as client:
        yield client
    running.stop()


@pytest.fixture
def theirs(tmp_path: Path, base: Path) -> Path:
    """An adapter of PEFT's on q and v, rank-stabilised, that names its base model's directory."""
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True)
    model: Any = peft.get_peft_model(reference_model(base), settings).eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name:
                randomise(parameter, seed)
    model.save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs", base_model_name_or_path=str(base))
    return tmp_path / "theirs"


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def their_logprobs(base: Path, directory: Path) -> np.ndarray:
    model = peft.PeftModel.from_pretrained(reference_model(base), str(directory)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return logits.log_softmax(-1)[torch.arange(4), torch.tensor(PROMPT[1:])].numpy()


def our_logprobs(service: tinkex.ServiceClient, path: str) -> np.ndarray:
    sampler = service.create_sampling_client(path)
    found = sampler.compute_logprobs(ModelInput.from_ints(PROMPT)).result(SECONDS)
    return np.array(found[1:], dtype=np.float32)


def test_an_import_samples_and_trains_on(
    service: tinkex.ServiceClient, base: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.adapter_upload.PIECE", 1000)  # many pieces of every file
    done: list[tuple[int, int | None]] = []
    rest = service.create_rest_client()
    path = rest.import_checkpoint(theirs, str(base) if rest._connection.base_url == "" else "tiny",
                                  progress=lambda *now: done.append(now)).result(SECONDS)  # fmt: skip
    assert path.endswith(":train:0/weights/theirs")
    sizes = sum(
        (theirs / name).stat().st_size for name in ("adapter_model.safetensors", "adapter_config.json")
    )
    assert done[-1] == (sizes, sizes)
    np.testing.assert_allclose(our_logprobs(service, path), their_logprobs(base, theirs), atol=1e-4)
    info = rest.get_weights_info_by_tinker_path(path).result(SECONDS)
    assert (info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed) == (4, True, False, False)
    run = service.create_training_client_from_state(path)
    datum = make_datum(np.random.default_rng(0), 12, 320)
    before = run.forward_backward([datum], "cross_entropy").result(SECONDS).metrics["loss:sum"]
    run.optim_step(AdamParams(learning_rate=1e-2)).result(SECONDS)
    after = run.forward([datum], "cross_entropy").result(SECONDS).metrics["loss:sum"]
    assert after < before
    listed = [one.tinker_path for one in rest.iter_checkpoints()]
    assert path in listed
    rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)


def test_a_saved_run_comes_back_with_its_optimizer(
    service: tinkex.ServiceClient, base: Path, tmp_path: Path
) -> None:
    """From the archive that a server offers, as a tar; steps go on as if it had never left."""
    name = str(base) if service._connection.base_url == "" else "tiny"
    run = service.create_lora_training_client(name, rank=2, seed=1)
    datum = make_datum(np.random.default_rng(0), 12, 320)

    def step(which: Any) -> None:
        which.forward_backward([datum], "cross_entropy").result(SECONDS)
        which.optim_step(AdamParams(learning_rate=1e-2)).result(SECONDS)

    step(run)
    saved = run.save_state("one").result(SECONDS).path
    rest = service.create_rest_client()
    url = rest.get_checkpoint_archive_url_from_tinker_path(saved).result(SECONDS).url
    from tinkex.client.download import download

    download(url, tmp_path / "one.tar")
    path = rest.import_checkpoint(tmp_path / "one.tar").result(SECONDS)
    assert path.endswith("/weights/one")
    again = service.create_training_client_from_state_with_optimizer(path)
    step(run)
    step(again)
    losses = [r.forward([datum], "cross_entropy").result(SECONDS).metrics["loss:sum"] for r in (run, again)]
    assert losses[0] == losses[1]
    with tarfile.open(tmp_path / "one.tar") as archive:  # without the optimizer, below a directory
        archive.extractall(tmp_path / "plain", filter="data")
    for file in ("optimizer.safetensors", "SHA256SUMS"):
        (tmp_path / "plain" / file).unlink()
    with tarfile.open(tmp_path / "plain.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "plain", "deep/plain")
    path = rest.import_checkpoint(tmp_path / "plain.tar.gz").result(SECONDS)
    assert path.endswith("/weights/plain")
    with pytest.raises(RequestFailedError, match="without optimizer"):
        service.create_training_client_from_state_with_optimizer(path)


def test_what_does_not_fit_is_refused_with_the_reason(
    service: tinkex.ServiceClient, base: Path, theirs: Path, tmp_path: Path
) -> None:
    rest, name = service.create_rest_client(), "tiny"
    if service._connection.base_url == "":
        name = str(base)
    edit(theirs, base_model_name_or_path="somebody/unknown-model-of-theirs.gguf")
    with pytest.raises(RequestFailedError, match="--base NAME"):
        rest.import_checkpoint(theirs).result(SECONDS)
    edit(theirs, use_dora=True)
    with pytest.raises(RequestFailedError, match="DoRA") as caught:
        rest.import_checkpoint(theirs, name).result(SECONDS)
    assert ".upload.part" not in str(caught.value)
    edit(theirs, use_dora=False)
    tensors = load_file(theirs / "adapter_model.safetensors")
    save_file({n: t[..., :7].contiguous() for n, t in tensors.items()}, theirs / "adapter_model.safetensors")
    with pytest.raises(RequestFailedError, match="another base model"):
        rest.import_checkpoint(theirs, name).result(SECONDS)
    with pytest.raises(APIStatusError, match="checkpoint's name"):
        rest.import_checkpoint(theirs, name, "../up").result(SECONDS)
    assert not list(rest.iter_checkpoints())


def test_sources_that_are_no_adapter(tmp_path: Path, theirs: Path) -> None:
    rest = tinkex.RestClient(base_url="http://127.0.0.1:1", api_key="tml-ann")

    def told(source: str | Path) -> str:
        with pytest.raises(InvalidInputError) as caught:
            rest.import_checkpoint(source).result(SECONDS)
        return str(caught.value)

    assert "there is no" in told(tmp_path / "nowhere")
    (tmp_path / "some.tar").write_bytes(b"not a tar")
    assert "no tar file" in told(tmp_path / "some.tar")
    outer = tmp_path / "outer"
    shutil.copytree(theirs, outer / "checkpoint-5")
    shutil.copytree(theirs, outer / "checkpoint-10")
    assert "checkpoint-10, checkpoint-5" in told(outer)
    (theirs / "adapter_model.safetensors").rename(theirs / "adapter_model.bin")
    assert "pickle" in told(theirs)
    (theirs / "adapter_model.bin").unlink()
    assert "adapter_model.safetensors" in told(theirs)
    (theirs / "adapter_config.json").rename(theirs / "config.json")
    assert "whole model" in told(theirs)
    assert "hf://OWNER/NAME" in told("hf://nobody")


def test_a_hub_of_ones_own(
    service: tinkex.ServiceClient, base: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(repo=repo, **options)
        return str(theirs)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    name = str(base) if service._connection.base_url == "" else "tiny"
    rest = service.create_rest_client()
    path = rest.import_checkpoint("hf://somebody/their-lora@v2", name).result(SECONDS)
    assert path.endswith("/weights/their-lora")
    assert (asked["repo"], asked["revision"]) == ("somebody/their-lora", "v2")
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_pieces_may_come_again_and_must_come_in_order(tmp_path: Path, base: Path, theirs: Path) -> None:
    settings = ServiceConfig(tmp_path / "home", {"tiny": str(base)}, engine=EngineConfig("", device="cpu"))
    running = Running(ServerConfig(settings, port=0, drain_seconds=0.1))
    with tinkex.ServiceClient(base_url=running.url, api_key="tml-ann") as client:
        connection, upload = client._connection, "0123456789abcdef"

        def send(offset: int, data: bytes, file: str = "adapter_model.safetensors") -> int:
            piece = UploadWeightsRequest(upload_id=upload, file=file, offset=offset, data=data)
            return connection.submit(ops.UPLOAD_WEIGHTS, piece).result(SECONDS).received

        def refused(offset: int, data: bytes, file: str) -> str:
            with pytest.raises(APIStatusError) as caught:
                send(offset, data, file)
            assert caught.value.status_code == 422
            return str(caught.value)

        data = (theirs / "adapter_model.safetensors").read_bytes()
        half = len(data) // 2
        assert send(0, data[:half]) == half
        assert send(0, data[:half]) == half  # the answer to the first was lost
        assert send(half - 5, data[half - 5 :]) == len(data)
        assert "too early" in refused(len(data) + 1, b"x", "adapter_model.safetensors")
        assert "no file" in refused(0, b"x", "optimizer.pt")
        assert "more than" in refused(imports.MAX_JSON, b"x", "adapter_config.json")
        send(0, (theirs / "adapter_config.json").read_bytes(), "adapter_config.json")
        other = tinkex.RestClient(base_url=running.url, api_key="tml-bob")
        ask = ImportWeightsRequest(upload_id=upload, base_model="tiny", name="x")
        with pytest.raises(APIStatusError, match="nothing was uploaded"):  # of this user's
            other._connection.submit(ops.IMPORT_WEIGHTS, ask).result(SECONDS)
        paths = {connection.submit(ops.IMPORT_WEIGHTS, ask).result(SECONDS).tinker_path for _ in range(3)}
        assert len(paths) == 1
        assert not list((tmp_path / "home").rglob(".upload.part"))
    running.stop()


def test_a_server_that_takes_no_imports_is_named(tmp_path: Path, theirs: Path) -> None:
    running = Running(ServerConfig(config(tmp_path / "home"), port=0, drain_seconds=0.1))
    del running.server.service._methods[ops.UPLOAD_WEIGHTS]
    with tinkex.ServiceClient(base_url=running.url, api_key="tml-ann") as client:
        with pytest.raises(TinkerError, match="takes no adapters from elsewhere"):
            client.create_rest_client().import_checkpoint(theirs).result(SECONDS)
    running.stop()


def test_unsloths_names_of_a_base_lead_to_it(tmp_path: Path, base: Path, theirs: Path) -> None:
    named = {"SmolLM2-135M-Instruct": str(base)}
    settings = ServiceConfig(tmp_path / "home", named, engine=EngineConfig("", device="cpu"))
    running = Running(ServerConfig(settings, port=0, drain_seconds=0.1))
    with tinkex.ServiceClient(base_url=running.url, api_key="tml-ann") as client:
        rest = client.create_rest_client()
        for name in ("unsloth/SmolLM2-135M-Instruct-unsloth-bnb-4bit", "HuggingFaceTB/SmolLM2-135M-Instruct"):
            edit(theirs, base_model_name_or_path=name)
            path = rest.import_checkpoint(theirs).result(SECONDS)
            info = rest.get_weights_info_by_tinker_path(path).result(SECONDS)
            assert info.base_model == "SmolLM2-135M-Instruct"
    running.stop()
