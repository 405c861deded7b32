"""Which tokenizer a model has, where it is loaded from, and chat templates. transformers is the oracle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import tinkex
import tinkex.tokenizers
from tests.engine.tiny import tiny_model
from tinkex.errors import InvalidInputError, TokenizerError
from tinkex.tokenizers import load_tokenizer, render_chat, tokenizer_name

pytestmark = pytest.mark.slow

LLAMA = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
WORDS = ["<unk>", "<eos>", "user", "assistant", ":", "hello", "world"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
    "{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tinkex.tokenizers, "_loaded", tinkex.tokenizers._LoadCache(32))
    for name in ("TINKEX_TOKENIZER_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def make(directory: Path, *words: str, chat_template: str | None = TEMPLATE) -> Path:
    """A tokenizer of whole words, as a model's directory has it."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate([*WORDS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    if chat_template:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


# -- which one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tokenizer_id", "name"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:experimental", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B/variant", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B/variant:tag", None, "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B", None, LLAMA),
        ("meta-llama/Llama-3.3-70B-Instruct/variant:x", None, LLAMA),
        ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
        ("someone/meta-llama/Llama-3", None, "someone/meta-llama"),  # the table goes by how names begin
        ("meta-llama/Llama-3.1-8B", "server/says", "server/says"),
        ("Qwen/Qwen3-8B", "server/says:revision", "server/says"),
        ("any/model", "baseten/Meta-Llama-3-tokenizer", LLAMA),
        ("moonshotai/Kimi-K2.5-Text-Only", None, "moonshotai/Kimi-K2.5"),
        ("any/model", "", "any/model"),
    ],
)
def test_the_servers_word_comes_first_then_the_table_then_the_name(
    model: str, tokenizer_id: str | None, name: str
):
    assert tokenizer_name(model, tokenizer_id) == name


def test_a_path_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = make(tmp_path / "a:b")
    assert tokenizer_name("any/model", str(place)) == str(place)
    assert tokenizer_name("/models/org/name:tag") == "/models/org/name:tag"
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "models" / "org" / "name")
    assert tokenizer_name("models/org/name") == "models/org/name"


def test_the_table_can_be_added_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tinkex.tokenizers.OVERRIDES, "local/", "shared/tokenizer")
    assert tokenizer_name("local/model-7b") == "shared/tokenizer"


# -- from where ------------------------------------------------------------------------------------------


def test_it_is_loaded_from_a_directory_the_root_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    explicit = make(tmp_path / "explicit", "explicit")
    make(tmp_path / "root" / "org" / "name", "root")
    path = make(tmp_path / "path", "path")
    monkeypatch.setenv("TINKEX_TOKENIZER_DIR", str(tmp_path / "root"))
    new = len(WORDS)
    assert load_tokenizer("org/name", directory=explicit).encode("hello explicit") == [5, new]
    assert load_tokenizer("org/name").encode("hello root") == [5, new]
    assert load_tokenizer(str(path)).encode("hello path") == [5, new]


def test_it_is_the_tokenizer_that_transformers_loads(tmp_path: Path):
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(str(make(tmp_path))), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.encode("hello world hello") == theirs.encode("hello world hello") == [5, 6, 5]


def test_no_name_leads_out_of_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path / "secret")
    (tmp_path / "root" / "org").mkdir(parents=True)
    monkeypatch.setenv("TINKEX_TOKENIZER_DIR", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path / "root" / "org")
    with pytest.raises(TokenizerError):
        load_tokenizer("org/../../secret", offline=True)


def test_a_fetched_tokenizer_comes_before_the_hub_and_after_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetched: list[str] = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        return make(tmp_path / "downloads" / name)

    assert load_tokenizer("org/remote", fetch=fetch).encode("world") == [6]
    make(tmp_path / "root" / "org" / "local")
    monkeypatch.setenv("TINKEX_TOKENIZER_DIR", str(tmp_path / "root"))
    load_tokenizer("org/local", fetch=fetch)
    assert fetched == ["org/remote"]


OFFLINE = """
import socket, sys
def no_network(*_): raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = no_network
from tinkex.tokenizers import load_tokenizer
print(load_tokenizer("org/cached", offline=True).encode("hello world"))
"""


def test_offline_it_comes_from_the_hubs_cache_without_any_network(tmp_path: Path):
    repository = tmp_path / "hub" / "models--org--cached"
    make(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TINKEX_TOKENIZER_DIR"):
        environment.pop(name, None)
    ran = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[5, 6]"


# -- what goes wrong -------------------------------------------------------------------------------------


def test_an_unknown_one_names_what_was_tried_and_how_to_work_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINKEX_TOKENIZER_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as the settings read it
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("org/nowhere")
    message = str(caught.value)
    for part in ("'org/nowhere'", str(tmp_path / "org/nowhere"), "cache", "TINKEX_TOKENIZER_DIR/org/nowhere"):
        assert part in message
    assert "\n" not in message


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="no directory"):
        load_tokenizer("org/name", directory=tmp_path / "missing")
    with pytest.raises(TokenizerError, match=rf"{tmp_path} holds no tokenizer"):
        load_tokenizer("org/name", directory=tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path: Path, kind: str):
    """transformers makes an empty tokenizer of a config.json alone, whose encode returns []."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 320}))
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(tmp_path)) < 10, "what would have been returned"
    with pytest.raises(TokenizerError, match=r"holds no tokenizer: .*tokenizer\.json.*token ids") as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_token_only_training_goes_on_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD"):
        monkeypatch.delenv(f"TINKER_{name}", raising=False)
    model = tiny_model(tmp_path, "qwen3")
    with tinkex.ServiceClient() as service:
        run = service.create_lora_training_client(str(model), rank=2)
        sampler = service.create_sampling_client(base_model=str(model))
        for client in (run, sampler):
            with pytest.raises(TokenizerError, match=f"{model} holds no tokenizer"):
                client.get_tokenizer(timeout=60)
        data = [tinkex.Datum(tinkex.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]
        assert run.forward_backward(data, "cross_entropy").result(60).metrics["loss:sum"] > 0
        sampled = sampler.sample(tinkex.ModelInput.from_ints([1, 2]), 1, tinkex.SamplingParams(max_tokens=2))
        assert len(sampled.result(60).sequences[0].tokens) > 0


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
from tinkex.errors import TokenizerError
from tinkex.tokenizers import load_tokenizer
try:
    load_tokenizer(sys.argv[1])
except TokenizerError as error:
    print(error)
"""


def test_without_transformers_the_extra_is_named(tmp_path: Path):
    make(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path)], capture_output=True, text=True
    )
    assert "pip install 'tinkex[tokenizers]'" in ran.stdout, ran.stderr


def test_importing_it_loads_nothing_heavy():
    program = "import sys, tinkex.tokenizers; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["transformers", "tokenizers", "torch", "numpy", "jinja2", "huggingface_hub"]
    ran = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_models_whose_tokenizer_is_a_package_use_it_or_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(TokenizerError, match="tml-renderers"):
        load_tokenizer("thinkingmachines/model")
    package = tmp_path / "tml_tokenizers"
    package.mkdir()
    (package / "__init__.py").touch()
    known = "{'TML/known': 'a tokenizer'}"
    (package / "tinker_tokenizers.py").write_text(
        f"def get_tinker_tokenizer(name):\n    return {known}.get(name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_tokenizer("TML/known") == "a tokenizer"
    with pytest.raises(TokenizerError, match="has no tokenizer for 'TML/unknown'"):
        load_tokenizer("TML/unknown")


# -- once ------------------------------------------------------------------------------------------------


def test_many_threads_load_a_name_once(tmp_path: Path):
    place, fetched, ready = make(tmp_path), [], threading.Barrier(8)

    def fetch(name: str) -> Path:
        fetched.append(name)
        return place

    def load(_: int) -> Any:
        ready.wait()
        return load_tokenizer("org/once", fetch=fetch)

    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(load, range(8)))
    assert len({id(tokenizer) for tokenizer in loaded}) == 1
    assert fetched == ["org/once"]
    shutil.rmtree(place)
    assert load_tokenizer("org/once") is loaded[0]


def test_a_failure_is_not_kept(tmp_path: Path):
    place = tmp_path / "late"
    with pytest.raises(InvalidInputError):
        load_tokenizer("org/late", directory=place)
    make(place)
    assert load_tokenizer("org/late", directory=place).encode("hello") == [5]


def test_who_waits_for_a_load_that_fails_is_told_too():
    cache, started, go = tinkex.tokenizers._LoadCache(2), threading.Event(), threading.Event()

    def fails() -> None:
        started.set()
        go.wait(10)
        raise TokenizerError("not today")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", fails)
        started.wait(10)
        second = pool.submit(cache.get, "a", lambda: "made anew")
        go.set()
        assert isinstance(first.exception(10), TokenizerError)
        assert isinstance(second.exception(10), TokenizerError) or second.result() == "made anew"
    assert cache.get("a", lambda: "later") in ("later", "made anew")


def test_the_ones_used_last_are_kept():
    cache, made = tinkex.tokenizers._LoadCache(2), []

    def get(key: str) -> None:
        cache.get(key, lambda: made.append(key))

    for key in ("a", "b", "a", "c", "a", "b"):
        get(key)
    assert made == ["a", "b", "c", "b"]


FORK = """
import os, sys, threading
from pathlib import Path
from tinkex.tokenizers import load_tokenizer
loading, go = threading.Event(), threading.Event()
def slow(name):
    loading.set()
    go.wait()
    return Path(sys.argv[1])
threading.Thread(target=load_tokenizer, args=("org/forked",), kwargs={"fetch": slow}).start()
loading.wait()
if (child := os.fork()) == 0:
    print(load_tokenizer("org/forked", fetch=lambda name: Path(sys.argv[1])).encode("hello"), flush=True)
    os._exit(0)
os.waitpid(child, 0)
go.set()
"""


def test_a_child_does_not_wait_for_what_its_parent_was_loading(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", FORK, str(make(tmp_path))], capture_output=True, text=True, timeout=100
    )
    assert ran.stdout.strip() == "[5]", ran.stderr


# -- chat ------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hello world"}]


def test_a_chat_is_rendered_by_the_tokenizers_own_template(tmp_path: Path):
    tokenizer = load_tokenizer(str(make(tmp_path)))
    assert render_chat(tokenizer, MESSAGES) == [2, 4, 5, 6, 3, 4]
    assert render_chat(tokenizer, MESSAGES, add_generation_prompt=False) == [2, 4, 5, 6]
    assert render_chat(tokenizer, MESSAGES, chat_template="{{ messages[0].content }}") == [5, 6]
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert render_chat(tokenizer, MESSAGES) == tokenizer.encode(text, add_special_tokens=False)


def test_what_the_template_is_given_reaches_it(tmp_path: Path):
    template = "{% if enable_thinking %}hello{% else %}world{% endif %}"
    tokenizer = load_tokenizer(str(make(tmp_path, chat_template=template)))
    assert render_chat(tokenizer, MESSAGES, enable_thinking=True) == [5]
    assert render_chat(tokenizer, MESSAGES, enable_thinking=False) == [6]


def test_without_a_template_the_error_says_what_to_do(tmp_path: Path):
    tokenizer = load_tokenizer(str(make(tmp_path, chat_template=None)))
    with pytest.raises(InvalidInputError, match=r"has no chat template .* pass chat_template=") as caught:
        render_chat(tokenizer, MESSAGES)
    assert str(tmp_path) in str(caught.value)


def test_messages_that_are_none_or_refused_are_the_users_error(tmp_path: Path):
    tokenizer = load_tokenizer(str(make(tmp_path)))
    with pytest.raises(InvalidInputError, match="at least one message"):
        render_chat(tokenizer, [])
    with pytest.raises(InvalidInputError, match="message 1 must be a mapping with a 'role'"):
        render_chat(tokenizer, [*MESSAGES, "hello"])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="refuses these messages: no system messages here"):
        render_chat(tokenizer, [{"role": "system", "content": "hello"}])
