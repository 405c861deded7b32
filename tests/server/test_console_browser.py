"""The console in a real browser, while a real model trains on a real server."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import expect

from tests.server.browser import Tab, until
from tests.server.served import MODEL, Serve
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient, render_chat

pytestmark = [pytest.mark.slow, pytest.mark.browser]

KEY = "tml-local"
SHOTS = os.environ.get("TINKEX_SCREENSHOTS")  # where pictures for the documentation go, if anywhere
REAL = Path("~/.tinkex/models/SmolLM2-135M-Instruct").expanduser()
PICTURED = bool(SHOTS) and REAL.is_dir()  # pictures are of a real model, if it is on this machine
QUESTION = "Write one short sentence about the sea."
PATIENCE = 120.0 if PICTURED else 20.0
if PICTURED:
    expect.set_options(timeout=60_000)
EVIL = "<img src=x onerror=alert(1)>"
SECOND = "grpo on poems" if PICTURED else f"evil {EVIL}"
REWARD = re.compile(r"^\s*reward")  # the curve that a client logs; another begins with its spread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    served = Serve(
        tmp_path_factory.mktemp("browser"),
        "--keep-rollouts",
        "1",
        text=True,
        model=REAL if PICTURED else None,
    )
    yield served
    served.terminate(30)


def as_datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> Datum:
    whole, before = prompt + tokens, [0.0] * (len(prompt) - 1)
    inputs = {"target_tokens": whole[1:], "logprobs": before + logprobs,
              "advantages": before + [advantage] * len(tokens)}  # fmt: skip
    return Datum(ModelInput.from_ints(whole[:-1]), inputs)


class Trainer:
    """A script that trains until it is told to stop: a policy gradient on its own samples."""

    def __init__(self, service: ServiceClient, name: str) -> None:
        model = REAL.name if PICTURED else MODEL
        self.run: TrainingClient = service.create_lora_training_client(model, rank=4, name=name, tags=["rl"])
        asked = [{"role": "user", "content": QUESTION}]
        self._prompt = render_chat(self.run.get_tokenizer(), asked) if PICTURED else [5, 6, 7]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        if number % 10 == 1:
            self._sampler = self.run.save_weights_and_get_sampling_client(timeout=60)
        params = SamplingParams(max_tokens=12, seed=number, stop=[])
        prompt = ModelInput.from_ints(self._prompt)
        drawn = self._sampler.sample(prompt, 2, params, topk_sample_logprobs=3).result(60)
        data = [
            as_datum(self._prompt, one.tokens, one.logprobs or [], (-1.0) ** k)
            for k, one in enumerate(drawn.sequences)
        ]
        self.run.forward_backward(data, "importance_sampling")
        self.run.optim_step(AdamParams(learning_rate=1e-4)).result(60)
        self.run.log({"reward": 1 - 1 / (1 + number)}).result(60)

    def _train(self) -> None:
        number = 0
        while not self._stop.wait(0.2):
            self.step(number := number + 1)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def trainers(server: Serve) -> Iterator[list[Trainer]]:
    service = ServiceClient(base_url=server.url, api_key=KEY)
    both = [Trainer(service, "grpo on sentences"), Trainer(service, SECOND)]
    yield both
    for one in both:
        one.stop()


@pytest.fixture(params=["wide", "narrow", "dark"])
def tab(request: pytest.FixtureRequest, browser: Any, server: Serve) -> Iterator[Tab]:
    size, scheme = ("narrow", "light") if request.param == "narrow" else ("wide", request.param)
    opened = Tab(browser, server.url, size, "dark" if scheme == "dark" else "light")
    opened.log_in(KEY)
    yield opened
    opened.page.context.close()


def finish(tab: Tab, name: str, *, whole: bool = True) -> None:
    tab.check()
    if SHOTS:
        tab.page.screenshot(path=Path(SHOTS) / f"{name}-{tab.look}.png", full_page=whole)


def test_the_list_of_runs_is_searched_as_one_types(tab: Tab, trainers: list[Trainer]) -> None:
    page = tab.go("/console/runs")
    page.wait_for_selector("table.runs tbody tr:nth-child(2)")
    assert page.locator("table.runs tbody").inner_text().count("running") == 2
    if SHOTS:
        done = page.locator("table.runs tbody td.right:not(.wide)")  # the list is live
        until(lambda: all(int(one) > 5 for one in done.all_inner_texts()), PATIENCE)
    finish(tab, "runs")
    page.fill("#q", "sentences")
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    assert "q=sentences" in page.url
    page.fill("#q", SECOND)
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    expect(page.locator("table.runs tbody th a").first).to_have_text(SECOND)
    page.fill("#q", "nothing is called so")
    page.wait_for_selector("text=No run matches")
    tab.check()


@pytest.mark.parametrize("tab", ["wide"], indirect=True)
def test_the_list_of_runs_tells_all_of_a_run_and_is_filtered_and_sorted(
    tab: Tab, server: Serve, trainers: list[Trainer]
) -> None:
    page = tab.go("/console/runs")
    row = page.locator("table.runs tbody tr", has_text="grpo on sentences")
    expect(row.locator("polyline")).to_be_visible()  # the loss over the steps, from the second on
    cells = row.locator("td").all_inner_texts()
    model, steps, tokens, loss, activity, owner, seconds = cells[2:]
    assert model == (REAL.name if PICTURED else MODEL)
    assert min(int(steps), float(tokens.rstrip("k"))) > 0
    assert float(loss) == float(loss), "a number"
    assert "just now" in activity or "ago" in activity
    assert owner == page.locator(".who span").inner_text()
    assert re.fullmatch(r"[\d.]+ (ms|s|min|h)", seconds), seconds
    expect(row.locator(".tag")).to_have_text("rl")
    names = page.locator("table.runs tbody th a:first-child")
    for turn, way in (("descending", -1), ("ascending", 1)):
        page.click("thead >> text=Run")
        expect(page.locator("thead th[aria-sort]")).to_have_attribute("aria-sort", turn)
        shown = names.all_inner_texts()
        assert shown == sorted(shown, reverse=way < 0), turn
    page.select_option("[name=state]", "running")
    expect(names).to_have_count(2)
    page.select_option("[name=state]", "failed")
    page.wait_for_selector("text=No run matches")
    page.select_option("[name=state]", "")
    row.locator(".tag").click()
    expect(page.locator("input[name=tag]")).to_have_value("rl")
    expect(row).to_have_count(1)
    tab.check()


def test_a_runs_curves_grow_while_it_is_watched(tab: Tab, trainers: list[Trainer]) -> None:
    run = trainers[0].run
    page = tab.go(f"/console/runs/{run.model_id}")
    page.wait_for_selector("figure canvas")
    page.wait_for_selector("text=live")
    page.wait_for_selector("figcaption >> text=Tokens per second")  # from the second step on
    titles = page.locator("figcaption").all_inner_texts()
    known = ("Loss", "reward", "KL sampler", "Entropy", "Gradient norm", "Learning rate", "Tokens per")
    for wanted in (*known, "Time of a step"):
        assert any(title.startswith(wanted) for title in titles), (wanted, titles)
    split = page.locator("figure", has=page.locator("figcaption", has_text="Time of a step"))
    expect(split.locator(".legend")).to_contain_text(re.compile("computing.*waiting.*publishing"))
    assert page.locator("#state .timeline rect").count() > 3
    expect(page.locator("#state .timeline title").first).to_have_text(re.compile(r"^\w+( \d+)?: [\d.]+ m?s"))
    facts = page.locator("section.card", has=page.locator("h2", has_text="Configuration"))
    expect(facts.locator("tr", has_text="LoRA rank")).to_contain_text("4")
    expect(facts.locator("tr", has_text="Learning rate")).to_contain_text("0.0001")
    steps = page.locator("#state dd").first
    before = int(steps.inner_text())
    reward = page.locator("figcaption", has_text=REWARD).locator(".faint")
    first = reward.inner_text()
    until(lambda: int(steps.inner_text()) > before + 3, PATIENCE)
    until(lambda: reward.inner_text() != first, PATIENCE)
    finish(tab, "run")


def test_runs_are_compared_from_the_list(tab: Tab, trainers: list[Trainer]) -> None:
    page = tab.go("/console/runs")
    for box in page.locator("table.runs tbody input[type=checkbox]").all():
        box.check()
    page.click("text=Compare the selected")
    page.wait_for_selector("figure canvas")
    assert page.url.count("run=") == 2
    reward = page.locator("figure", has=page.locator("figcaption", has_text=REWARD))
    assert reward.locator(".legend > span").count() == 2
    last = page.locator("[aria-label='Final metrics'] tbody th").all_inner_texts()
    assert len(set(last)) == len(last)
    assert {"Loss", "Importance ratio (trainer/sampler): mean", "Advantage: mean"} <= set(last)
    assert "lora.seed" in page.locator("tr.differs").all_inner_texts()[0]
    finish(tab, "compare")


@pytest.mark.parametrize("tab", ["wide"], indirect=True)
def test_a_run_is_renamed_and_tagged_with_the_keyboard(tab: Tab, trainers: list[Trainer]) -> None:
    run = trainers[1].run
    page = tab.go(f"/console/runs/{run.model_id}")
    page.focus("#name")
    page.keyboard.press("Control+A")
    name = SECOND if PICTURED else f"evil {EVIL} {tab.look}"
    page.keyboard.type(name)
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type(f"a, {EVIL}")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(name)
    assert page.locator("main img").count() == 0
    assert page.locator(".title .tag").all_inner_texts() == ["a", EVIL]
    tab.check()


def test_rollouts_show_tokens_and_what_training_made_of_them(tab: Tab, trainers: list[Trainer]) -> None:
    run = trainers[0].run
    rows = tab.page.locator("table.runs tbody tr")
    until(
        lambda: tab.go(f"/console/runs/{run.model_id}/rollouts?trained=1") and rows.count(), PATIENCE
    )  # not live
    page = tab.page
    finish(tab, "rollouts")
    step = page.locator("table.runs tbody td").first.inner_text()
    answers = rows.first.locator("td a")  # a cell for each answer of the group
    assert answers.count() == min(16, int(rows.first.locator("td").nth(1).text_content() or 0))
    assert answers.last.inner_text() != ""
    answers.nth(1).click()
    expect(page).to_have_url(re.compile("#answer-2$"))
    expect(page.locator("#answer-2")).to_be_in_viewport()
    expect(page.locator(".chart-tools label").first).to_contain_text(f"Step {step}")
    trained = page.locator(".sample", has_text="Trained at step").first
    trained.scroll_into_view_if_needed()
    tokens = trained.locator(".tokens span")
    expect(tokens).to_have_count(12)
    token = tokens.filter(visible=True).nth(2)  # an end of a line has no width
    token.hover()
    expect(page.locator(".tip")).to_contain_text("logprob")
    expect(page.locator(".tip")).to_contain_text("difference")
    expect(page.locator(".tip")).to_contain_text(re.compile(r"likely: .* % · .* % · .* %"))
    page.select_option("#colour", "advantage")
    expect(token).to_have_class("g4")
    finish(tab, "rollout", whole=False)  # tokens of answers further down are not fetched yet
    if step != "0":
        page.locator("input[name=at]").press("Home")
        expect(page.locator(".chart-tools label").first).to_contain_text("Step 0")
        expect(page.locator(".sample .tokens span").first).to_have_class(re.compile("^g"))
        expect(page.locator("#colour")).to_have_value("advantage")
    tab.check()


def test_checkpoints_are_copied_and_deleted_after_a_question(tab: Tab, trainers: list[Trainer]) -> None:
    run = trainers[0].run
    path = run.save_weights_for_sampler(f"shown-{tab.look}").result(60).path
    page = tab.go("/console/checkpoints")
    row = page.locator("li.saved", has_text=path)
    finish(tab, "checkpoints")
    row.locator("summary").click()
    page.once("dialog", lambda dialog: dialog.dismiss())
    row.locator("button.danger").click()
    expect(row).to_have_count(1)
    page.once("dialog", lambda dialog: dialog.accept())
    row.locator("button.danger").click()
    expect(page.locator("li.saved", has_text=path)).to_have_count(0)
    tab.check()


def test_the_page_of_what_goes_on_is_live(tab: Tab, trainers: list[Trainer]) -> None:
    page = tab.go("/console/now")
    expect(page.locator("#live")).to_have_text("live")
    count = page.locator("tr", has_text="optim_step: executed").locator("td").first
    before = count.inner_text()
    until(lambda: count.inner_text() != before)
    finish(tab, "now")


def test_two_models_answer_side_by_side(tab: Tab, trainers: list[Trainer]) -> None:
    path = trainers[0].run.save_weights_for_sampler(f"played-{tab.look}").result(60).path
    model, text = (REAL.name, QUESTION) if PICTURED else (MODEL, "<b>hello</b>")
    page = tab.go(f"/console/playground?{urlencode([('model', model), ('model', path)])}")
    page.select_option("[name=mode]", "chat" if PICTURED else "text")
    page.fill("[name=prompt]", text)
    page.fill("[name=max_tokens]", "24" if PICTURED else "10")
    page.click("#show-tokens")
    expect(page.locator("#as-tokens pre")).to_contain_text(text)
    page.click("text=Sample")
    expect(page.locator("#answers article")).to_have_count(2)
    for card in page.locator("#answers article").all():
        expect(card).to_contain_text("ended by")
    first = page.locator("#answers article").nth(0).locator(".tokens span").first
    if tab.look != "narrow":  # a phone has no pointer to hover with
        first.hover()
        expect(page.locator(".tip")).to_contain_text("%")
    page.click("text=Copy as curl")
    expect(page.locator("#code pre")).to_contain_text(
        "/v1/chat/completions" if PICTURED else "/v1/completions"
    )
    finish(tab, "playground")


def test_the_login_and_the_way_out(browser: Any, server: Serve) -> None:
    tab = Tab(browser, server.url)
    tab.page.goto(f"{server.url}/console/runs?q=x")
    assert tab.page.input_value("#key") == "tml-local"
    tab.check()
    tab.page.click("main button")
    tab.page.wait_for_url("**/console/runs?q=x")
    tab.page.click("text=Log out")
    tab.page.wait_for_url("**/console/login")
    tab.go("/console/runs")
    assert "/console/login" in tab.page.url
    assert tab.problems == []
