"""What a browser shows of runs that wait, of folded thoughts, and of the processes of a cluster."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect
from tokenizers import Tokenizer

from tests.cluster.nodes import Nodes
from tests.server.browser import Tab
from tests.server.conftest import MODEL, Running
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient
from tinkex.engine.protocol import Placement
from tinkex.server.console import console_data
from tinkex.service import run_listing
from tinkex.types.outputs import SampledSequence, SampleResponse
from tinkex.types.sampling import SampleRequest

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.xdist_group("ray")]

KEY = "tml-alice"
Training = Callable[[Running, str], TrainingClient]
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]


def opened(browser: Any, server: Running) -> Tab:
    tab = Tab(browser, server.url)
    tab.log_in(KEY)
    return tab


@pytest.fixture
def training() -> Iterator[Callable[[Running, str], TrainingClient]]:
    """Makes a run of this name."""
    services: list[ServiceClient] = []

    def make(server: Running, name: str) -> TrainingClient:
        services.append(ServiceClient(base_url=server.url, api_key=KEY))
        return services[-1].create_lora_training_client(MODEL, rank=4, name=name, timeout=60)

    yield make
    for service in services:
        service.close().result(20)


def test_a_run_tells_whom_it_waits_for_and_then_that_its_client_is_silent(
    browser: Any, start: Callable[..., Running], training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    runs = [training(server, name) for name in ("the first", "the second", "the third")]
    engine: Any = server.server.service.models.find(MODEL).engine
    held = threading.Event()
    engine.trainer._thread.submit(held.wait)  # as a long pass of somebody would
    tab = opened(browser, server)
    try:
        passes = []
        for run in runs:
            passes.append(run.forward_backward(DATA, "cross_entropy"))
            time.sleep(0.3)
        page = tab.go(f"/console/runs/{runs[2].model_id}")
        expect(page.locator("#state .waits")).to_have_text(
            "3rd in the queue, behind the first and the second"
        )
        expect(page.locator("#state")).to_contain_text("running")
        tab.check()
    finally:
        held.set()
    for one in passes:
        one.result(20)
    expect(page.locator("#state .waits")).to_have_count(0)  # without a reload
    for module in (run_listing, console_data):
        monkeypatch.setattr(module, "RUNNING_SECONDS", 1.0)
    expect(page.locator("#state")).to_contain_text(re.compile(r"its client has sent nothing for [1-9]\d* s"))
    expect(page.locator("#state .state")).to_have_text("idle")
    monkeypatch.undo()
    runs[2].optim_step(AdamParams()).result(20)
    expect(page.locator("#state .state")).to_have_text("running")
    tab.check()


THOUGHTS = "<think>\nis it <b>4</b>?</think>\nYes.\n<tool_call>{}</tool_call>\nDone"


def keep(server: Running, run: TrainingClient, prompt: list[int], answer: list[int]) -> None:
    """An answer that the engine could have drawn, to the recorder that observes its answers."""
    service = server.server.service
    sampler = run.save_weights_and_get_sampling_client(timeout=20)
    row = service.ledger.sampler(sampler._sampling_session_id)
    assert row is not None
    request = SampleRequest(ModelInput.from_ints(prompt), SamplingParams(max_tokens=99))
    tokens, logprobs = np.array(answer, np.int32), np.full(len(answer), -0.5, np.float32)
    sequence = SampledSequence("stop", tokens_np=tokens, logprobs_np=logprobs)
    service.rollouts.sampled(row, 0.1, SampleResponse([sequence]), request)
    service.rollouts.flush()


def test_thoughts_and_tool_calls_are_folded_and_opened_by_the_keyboard(
    browser: Any, start: Callable[..., Running], training: Training, tokenizer_dir: Path
) -> None:
    server = start(keep_rollouts=1.0)
    encode = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).encode
    run, goes_on = training(server, "thinks"), training(server, "goes on thinking")
    keep(server, run, encode("2+2?").ids, encode(THOUGHTS).ids)
    keep(server, goes_on, encode("2+2?<think>\n").ids, encode("hm</think>4").ids)
    tab = opened(browser, server)
    page = tab.go(f"/console/runs/{run.model_id}/rollouts")
    page.click("table.runs tbody th a >> nth=0")
    answer = page.locator(".sample .tokens")
    thought, called = answer.locator("details").nth(0), answer.locator("details").nth(1)
    assert [one.inner_text() for one in (thought, called)] == ["thinking", "tool call"], (
        "nothing of what is in"
    )
    assert answer.locator("> span").all_inner_texts()[-4:] == list("Done")
    page.focus(".sample .tokens")
    page.keyboard.press("Tab")
    expect(thought.locator("summary")).to_be_focused()
    page.keyboard.press("Enter")
    expect(thought).to_have_attribute("open", "")
    expect(thought).to_contain_text("is it <b>4</b>?</think>")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(called).to_contain_text("{}")
    tab.check()
    page.focus(".sample .tokens")
    page.keyboard.press("ArrowLeft")  # the last token: what a pointer would show
    expect(page.locator(".tip")).to_contain_text('"e"')
    expect(page.locator(".unseen[role=status]")).to_contain_text('"e"')  # for screen readers
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tip")).to_contain_text('"n"')
    page.keyboard.press("Escape")
    expect(page.locator(".tip")).to_have_count(0)
    page = tab.go(f"/console/runs/{goes_on.model_id}/rollouts")
    page.click("table.runs tbody th a >> nth=0")
    expect(page.locator(".sample .tokens details")).to_have_text("thinkinghm</think>")
    assert page.locator(".sample .tokens > span").all_inner_texts() == ["4"]
    tab.check()


def test_the_processes_of_a_cluster_are_told_one_by_one(
    browser: Any, start: Callable[..., Running], training: Training, ray_nodes: Nodes
) -> None:
    server = start(placements={MODEL: Placement(ray_nodes.address, trainers=2, samplers=1)})
    tab = opened(browser, server)
    page = tab.go("/console/now")
    run = training(server, "far away")
    run.forward_backward(DATA, "cross_entropy").result(60)
    rows = page.locator(f"[aria-label='Processes of {MODEL}'] tbody tr")
    expect(rows).to_have_count(3, timeout=60_000)
    assert rows.locator("th").all_inner_texts() == ["trainer 0", "trainer 1", "sampler 0"]
    for row in rows.all():
        assert row.locator("td").first.inner_text() != ""
        expect(row).to_contain_text("works")
    expect(rows.nth(0)).to_contain_text("0 / 288")
    adapters = rows.locator("td:nth-child(5)")
    expect(adapters.nth(0)).to_have_text("1", timeout=10_000)  # the run is on this trainer, and tells so
    assert adapters.nth(1).inner_text() == "0"
    expect(page.locator("text=Trainer 1: shares the current pass")).to_be_visible()
    tab.check()
