"""Modelfiles: Go's own template engine writes what the model's Jinja template writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.engine.llama_cpp import merging_tokenizer
from tests.engine.tiny import tiny_model
from tinkex.engine.torch.gguf_export import export_gguf
from tinkex.engine.torch.ollama import chat_format, modelfile

pytestmark = pytest.mark.slow
CHATS = [
    [("user", "Hello, what is 1 < 2 & 'x'?")],
    [("system", "Be brief."), ("user", "one"), ("assistant", "two"), ("user", "three\nlines {{ here }}")],
]
_END = "{% endfor %}{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + _END + "<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>" + _END + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n" + _END + "<start_of_turn>model\n{% endif %}"
)
COUNTING = "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}"
GO = "import sys; from go_template import render_template; render_template(*sys.argv[1:])"


def directory(tmp_path: Path, template: str, bos: str = "", *, added: bool = False) -> Path:
    """A tokenizer with this template and first token, which it adds to every text, or does not."""
    place = merging_tokenizer(tmp_path)
    if bos:
        settings = json.loads((place / "tokenizer_config.json").read_text())
        (place / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": bos}))
    if added:
        tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
        first = (bos, tokenizer.token_to_id(bos))
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[first])
        tokenizer.save(str(place / "tokenizer.json"))
    (place / "chat_template.jinja").write_text(template)
    return place


def by_go(tmp_path: Path, template: str, messages: list[tuple[str, str]]) -> str:
    """Go's text/template, from a package that has it compiled."""
    values, out = tmp_path / "values.yml", tmp_path / "out.txt"
    (tmp_path / "t.tmpl").write_text(template)
    values.write_text(json.dumps({"Messages": [{"Role": r, "Content": c} for r, c in messages]}))
    subprocess.run([sys.executable, "-c", GO, str(tmp_path / "t.tmpl"), str(values), str(out)], check=True)
    return out.read_text()


@pytest.mark.parametrize(
    ("template", "bos", "added"),
    [
        (CHATML, "", False), (CHATML, "<|im_start|>", False), (HEADERS, "<|endoftext|>", True),
        (TURNS, "<|endoftext|>", True),
    ],
    ids=["chatml", "smollm2", "headers", "turns"],
)  # fmt: skip
def test_go_writes_what_jinja_writes(tmp_path: Path, template: str, bos: str, added: bool) -> None:
    """But for the first token, if the tokenizer adds it: then Ollama does so too."""
    from transformers import AutoTokenizer

    place = directory(tmp_path, template, bos, added=added)
    tokenizer = AutoTokenizer.from_pretrained(place)
    format = chat_format(place)
    assert format is not None
    for chat in CHATS:
        chat = [one for one in chat if one[0] in format.around]
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if format.system and chat[0][0] != "system":
            chat = [("system", format.system), *chat]
        assert by_go(tmp_path, format.go(), chat) == expected.removeprefix(bos if added else "")
    assert (format.system == "You are kind.") is (template is CHATML)


def test_a_modelfile_names_file_template_and_stops(tmp_path: Path) -> None:
    place = directory(tmp_path, CHATML)
    (place / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    text = modelfile(place, "model.gguf")
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """{{ range .Messages }}')
    assert 'SYSTEM """You are kind."""' in text
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert 'PARAMETER stop "<|endoftext|>"' in text


@pytest.mark.parametrize("template", [COUNTING, "{% if %}", "{{ raise_exception('never') }}"])
def test_a_template_that_go_cannot_say_is_left_out(tmp_path: Path, template: str) -> None:
    place = directory(tmp_path, template)
    assert chat_format(place) is None
    assert "TEMPLATE" not in modelfile(place, "model.gguf")
    assert 'PARAMETER stop "<|im_end|>"' in modelfile(place, "model.gguf")


def test_the_directory_has_both_files(tmp_path: Path) -> None:
    path = merging_tokenizer(tiny_model(tmp_path, "qwen2"))
    export_gguf(path, None, tmp_path / "out", quantize="q8_0", ollama=True)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.gguf", "Modelfile", "SHA256SUMS"}
    assert "<|im_start|>" in (tmp_path / "out" / "Modelfile").read_text()
