"""A tokenizer with no hub in reach: from the files that a server of ours offers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.stub import Stub, status
from tinkex import TokenizerError
from tinkex.client.service import ServiceClient

WORDS = {"[UNK]": 0, "hello": 1, "world": 2}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def offer(stub: Stub) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    stub.script("tokenizer/tokenizer.json", status(200, {}, tokenizer.to_str().encode()), always=True)
    stub.script("tokenizer/tokenizer_config.json", status(200, {}, json.dumps(config).encode()), always=True)


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
    assert sorted(p.name for p in kept.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert not list(home.glob("tokenizers/*/.part-*"))


def test_a_server_without_tokenizers_leaves_the_hub(home: Path) -> None:
    with Stub() as stub, ServiceClient(base_url=stub.url) as service:
        sampler = service.create_sampling_client(base_model="stub/other")
        with pytest.raises(TokenizerError, match="stub/other"):
            sampler.get_tokenizer()
        assert stub.count("tokenizer/tokenizer.json") == 1
    assert not list(home.glob("tokenizers/*/stub--other"))
