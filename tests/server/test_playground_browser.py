"""The playground in a real browser: chat templates, streaming, likely tokens, and the code that it gives."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server.browser import Tab
from tests.server.served import MODEL, Serve
from tinkex import ServiceClient

pytestmark = [pytest.mark.slow, pytest.mark.browser]

KEY = "tml-local"
COUNT = """() => {
  const answers = document.getElementById("answers");
  window.counted = new Set();
  new MutationObserver(() => counted.add(answers.querySelectorAll(".tokens span").length))
    .observe(answers, { childList: true, subtree: true });
}"""
STOP_AT_ONCE = """() => {
  const answers = document.getElementById("answers");
  new MutationObserver((_, observer) => {
    if (!answers.querySelector(".tokens span")) return;
    observer.disconnect();
    document.getElementById("stop").click();
  }).observe(answers, { childList: true, subtree: true });
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    served = Serve(tmp_path_factory.mktemp("playground"), text=True)
    yield served
    served.terminate(30)


@pytest.fixture
def tab(browser: Any, server: Serve) -> Iterator[Tab]:
    opened = Tab(browser, server.url)
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.log_in(KEY)
    opened.go("/console/playground")
    yield opened
    opened.page.context.close()


def ask(page: Any, prompt: str, tokens: int, *, mode: str = "text") -> None:
    page.select_option("[name=mode]", mode)
    page.fill("[name=prompt]", prompt)
    page.fill("[name=max_tokens]", str(tokens))


def drawn(page: Any) -> list[int]:
    return page.locator("#answers .tokens span").evaluate_all("all => all.map((one) => one.token.id)")


def test_a_chat_is_shown_as_its_template_makes_it_and_is_answered(tab: Tab) -> None:
    page = tab.page
    ask(page, "What is <b>2+2</b>?", 5, mode="chat")
    page.fill("[name=system]", "Be brief.")
    page.click("#show-tokens")
    expect(page.locator("#as-tokens pre")).to_have_text(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is <b>2+2</b>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    special = page.locator("#as-tokens span", has_text="<|im_start|>")
    assert special.count() == 3, "one token each"
    page.click("text=Sample")
    expect(page.locator("#answers article")).to_contain_text(re.compile(r"[1-5] tokens.*ended by"))
    expect(page.locator("#told")).to_contain_text("ended by")
    tab.check()


def test_tokens_appear_while_more_are_drawn_and_stop_ends_them(tab: Tab) -> None:
    page = tab.page
    ask(page, "hello", 200)
    page.fill("[name=temperature]", "0")  # greedily, it does not come to an end by itself
    page.evaluate(COUNT)
    page.click("text=Sample")
    card = page.locator("#answers article")
    expect(card).to_contain_text("ended by length", timeout=60_000)
    assert page.evaluate("[...counted]")[-1] == 200
    assert page.evaluate("counted.size") > 3, "they came all at once"
    page.evaluate(STOP_AT_ONCE)
    page.click("text=Sample")
    expect(card).to_contain_text("stopped")
    assert 0 < page.locator("#answers .tokens span").count() < 200
    tab.check()


def test_what_was_likely_is_shown_for_a_token_and_told_to_screen_readers(tab: Tab) -> None:
    page = tab.page
    ask(page, "hello", 4)
    page.click("text=Sample")
    expect(page.locator("#answers article")).to_contain_text("ended by")
    page.locator("#answers .tokens span").first.hover()
    tip = page.locator(".tip")
    expect(tip).to_contain_text(re.compile(r'likely: "(?:.|\n)*" [\d.]+ %( · "(?:.|\n)*" [\d.]+ %){4}'))
    box, token = tip.bounding_box(), page.locator("#answers .tokens span").first.bounding_box()
    assert box["y"] + box["height"] <= token["y"], "above, where it hides nothing that comes"
    tab.check()


def test_the_code_it_gives_draws_the_same_tokens(tab: Tab, server: Serve) -> None:
    page = tab.page
    ask(page, 'it\'s "quoted" \\ and\ntwo lines', 6, mode="chat")
    page.fill("[name=system]", "Be 'brief'.")
    page.fill("[name=top_k]", "3")
    page.fill("[name=seed]", "7")
    page.click("text=Sample")
    expect(page.locator("#answers article")).to_contain_text("ended by")
    answer, ids = "".join(page.locator("#answers .tokens span").all_text_contents()), drawn(page)
    assert answer
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINK")} | {"TINKER_API_KEY": KEY}

    def copied(name: str) -> str:
        page.click(f"text={name}")
        expect(page.locator("#code pre")).not_to_be_empty()
        text = page.evaluate("navigator.clipboard.readText()")
        assert text == page.locator("#code pre").text_content()
        return text

    python = copied("Copy as Python")
    script = python + "print(answer.tokens)\n"
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == str(ids)

    curl = copied("Copy as curl")
    assert shlex.split(curl)[0] == "curl"
    assert '"top_k":3' in curl
    told = subprocess.run(["bash", "-c", curl], env=environment, capture_output=True, text=True)
    assert '"content":' in told.stdout, told
    sampler = ServiceClient(base_url=server.url, api_key=KEY).create_sampling_client(base_model=MODEL)
    content = json.loads(told.stdout)["choices"][0]["message"]["content"]
    whole = sampler.get_tokenizer().decode(ids)
    assert whole.startswith(content), "without the end of a turn"
    tab.check()


def test_a_checkpoint_is_named_by_its_run_and_its_path_is_copied(tab: Tab, server: Serve) -> None:
    service = ServiceClient(base_url=server.url, api_key=KEY)
    run = service.create_lora_training_client(MODEL, rank=4, name="teacher", timeout=60)
    path = run.save_weights_for_sampler("best").result(60).path
    page = tab.go("/console/checkpoints")
    page.locator("li.saved", has_text=path).get_by_text("Copy path").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == path
    tab.check()
    page.locator("li.saved", has_text=path).get_by_text("Playground").click()
    assert page.input_value("[name=model] >> nth=0") == path
    expect(page.locator("#ask output").first).to_have_text(re.compile("^teacher · .*best$"))
    ask(page, "hello", 3)
    page.click("text=Sample")
    expect(page.locator("#answers h2")).to_have_text(re.compile("^teacher · .*best$"))
    tab.check()
