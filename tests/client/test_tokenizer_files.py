"""Which tokenizer a client loads, and from where, without access to the hub."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.stub import Stub, status
from tinkex import ServiceClient, TinkerError, TokenizerError
from tinkex.tokenizers import _loaded

WORDS = {"[UNK]": 0, "hello": 1, "world": 2}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


CONFIG = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})


def words(vocabulary: dict[str, int]) -> str:
    """The tokenizer.json of these words."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def offer(stub: Stub) -> None:
    stub.script("tokenizer/tokenizer.json", status(200, {}, words(WORDS).encode()), always=True)
    stub.script("tokenizer/tokenizer_config.json", status(200, {}, CONFIG.encode()), always=True)


def test_a_sampler_reads_its_tokenizer_from_the_server_and_keeps_it(home: Path) -> None:
    with Stub() as stub:
        offer(stub)
        with ServiceClient(base_url=stub.url) as service:
            sampler = service.create_sampling_client(base_model="stub/base")
            assert sampler.get_tokenizer().encode("hello world") == [1, 2]
            asked = stub.count("tokenizer/tokenizer.json")
            assert asked == 1
            assert sampler.get_tokenizer().encode("world") == [2]
            assert stub.count("tokenizer/tokenizer.json") == asked
    (kept,) = home.glob("tokenizers/*/stub--base")
    assert sorted(p.name for p in kept.glob("*.json")) == ["tokenizer.json", "tokenizer_config.json"]
    assert not list(home.glob("tokenizers/*/.part-*"))


def test_a_damaged_copy_is_fetched_again(home: Path) -> None:
    with Stub() as stub:
        offer(stub)
        for _ in range(2):
            _loaded._values.clear()  # as in a new process
            with ServiceClient(base_url=stub.url) as service:
                sampler = service.create_sampling_client(base_model="stub/base")
                assert sampler.get_tokenizer().encode("hello world") == [1, 2]
            (file,) = home.glob("tokenizers/*/stub--base/tokenizer.json")
            file.write_bytes(file.read_bytes().replace(b"world", b"wormd"))
        assert stub.count("tokenizer/tokenizer.json") == 2


def test_a_server_without_tokenizers_leaves_the_hub(home: Path) -> None:
    with Stub() as stub, ServiceClient(base_url=stub.url) as service:
        sampler = service.create_sampling_client(base_model="stub/other")
        with pytest.raises(TokenizerError, match="stub/other"):
            sampler.get_tokenizer()
        assert stub.count("tokenizer/tokenizer.json") == 1
    assert not list(home.glob("tokenizers/*/stub--other"))


NAMED = {
    "server/says": 1,
    "org/name": 2,
    "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer": 3,
}  # by what "hello" is in each


@pytest.fixture
def tokenizers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in NAMED.items():
        place = home / "root" / name
        place.mkdir(parents=True)
        others = {f"word{n}": n for n in range(1, number)}
        (place / "tokenizer.json").write_text(words({"[UNK]": 0, **others, "hello": number}))
        (place / "tokenizer_config.json").write_text(CONFIG)
    monkeypatch.setenv("TINKEX_TOKENIZER_DIR", str(home / "root"))


@pytest.mark.parametrize("wait", ["sync", "async"])
@pytest.mark.parametrize(
    ("base_model", "hello"), [("org/name/variant:tag", 2), ("meta-llama/Llama-3.1-8B", 3), ("org/name", 2)]
)
def test_runs_and_samplers_choose_alike(tokenizers: None, base_model: str, hello: int, wait: str) -> None:
    """The table of renamed models, then the name; without blocking a loop, if asked so."""
    with Stub() as stub, ServiceClient(base_url=stub.url) as service:
        run = service.create_lora_training_client(base_model)
        sampler = service.create_sampling_client(base_model=base_model)
        for client in (run, sampler):
            tokenizer = client.get_tokenizer() if wait == "sync" else asyncio.run(awaited(client))
            assert tokenizer.encode("hello") == [hello]


async def awaited(client: Any) -> Any:
    return await client.get_tokenizer_async(timeout=20)


def test_the_servers_word_comes_first(tokenizers: None) -> None:
    with Stub() as stub, ServiceClient(base_url=stub.url) as service:
        run = service.create_lora_training_client("meta-llama/Llama-3.1-8B")
        data = {"model_name": "meta-llama/Llama-3.1-8B", "tokenizer_id": "server/says"}
        stub.script("get_info", status(200, body={"model_id": run.model_id, "model_data": data}))
        assert run.get_tokenizer().encode("hello") == [1]


def test_a_server_that_names_neither_model_nor_tokenizer_is_told_so(tokenizers: None) -> None:
    with Stub() as stub, ServiceClient(base_url=stub.url) as service:
        run = service.create_lora_training_client("org/name")
        stub.script("get_info", status(200, body={"model_id": run.model_id, "model_data": {}}))
        with pytest.raises(TinkerError, match="does not say which model"):
            run.get_tokenizer()
