"""The pages that `get_console_url` names: read as a browser would, at the addresses that the client gives."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import pytest

from tests.server.conftest import KEY, MODEL, Running
from tinkex import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient

ALICE = KEY["x-api-key"]
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]


def login(key: str, name: str = "me") -> dict[str, str]:
    """What a browser sends once its user has filled in the prompt."""
    return {"authorization": f"Basic {base64.b64encode(f'{name}:{key}'.encode()).decode()}"}


class Words(HTMLParser):
    """A page's text and links; nothing of it may come from elsewhere."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.text, self.links, self.tags = "", list[str](), set[str]()
        self.feed(page.decode())

    def handle_data(self, data: str) -> None:
        self.text += f" {data.strip()}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src") and value]


@pytest.fixture
def trained(server: Running) -> TrainingClient:
    service = ServiceClient(base_url=server.url, api_key=ALICE)
    run = service.create_lora_training_client(MODEL, rank=4, user_metadata={"why": "<b>fun</b>"}, timeout=20)
    for _ in range(3):
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(AdamParams(learning_rate=0.25)).result(20)
    run.save_state("half-way").result(20)
    return run


def test_a_runs_page_tells_what_it_is_and_how_far_it_got(server: Running, trained: TrainingClient) -> None:
    url = trained.get_console_url()
    answer = server.ask("GET", urlsplit(url).path, headers=login(ALICE), key=None)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Words(answer.body)
    assert f"Run {trained.model_id}" in page.text
    for fact in (f"Base model {MODEL}", "LoRA rank 4", "Status running", "Steps 3", "learning_rate 0.25"):
        assert fact in re.sub(r"\s+", " ", page.text)
    assert f"tinker://{trained.model_id}/weights/half-way" in page.text
    assert "svg" in page.tags
    assert "b" not in page.tags, "what users write is text"
    assert not page.tags & {"script", "link", "img", "iframe"}


def test_the_list_leads_to_every_run_and_back(server: Running, trained: TrainingClient) -> None:
    service = ServiceClient(base_url=server.url, api_key=ALICE)
    other = service.create_lora_training_client(MODEL, rank=4, timeout=20)
    url = service.get_console_url()
    answer = server.ask("GET", urlsplit(url).path, headers=login(ALICE), key=None)
    links = [urljoin(url, link) for link in Words(answer.body).links]
    assert links[:2] == [other.get_console_url(), trained.get_console_url()], "newest first"
    back = server.ask("GET", urlsplit(links[0]).path, headers=login(ALICE), key=None)
    assert [urljoin(links[0], link) for link in Words(back.body).links] == [url]
    assert "none yet" in Words(back.body).text


@pytest.mark.parametrize("path", ["/sessions", "/training_runs/none"])
def test_a_browser_is_asked_for_the_key(server: Running, path: str) -> None:
    odd = [{"authorization": f"Basic {text}"} for text in ("%%%", "é", "gICA")]
    for headers in ({}, *odd):
        answer = server.ask("GET", path, headers=headers, key=None)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Basic realm=")
        assert b"tml-" in answer.body


def test_a_page_shows_nothing_of_anybody_elses(server: Running, trained: TrainingClient) -> None:
    path = urlsplit(trained.get_console_url()).path
    assert server.ask("GET", path, headers=login("tml-bob"), key=None).status == 404
    listed = server.ask("GET", "/sessions", headers=login("tml-bob"), key=None)
    assert (listed.status, Words(listed.body).links) == (200, [])


def test_the_api_takes_no_login_of_a_browsers(server: Running) -> None:
    """Browsers send it with whatever another site makes them ask for."""
    answer = server.ask("POST", "/api/v1/create_session", {}, headers=login(ALICE), key=None)
    assert answer.status == 401
    assert "www-authenticate" not in answer.headers


def test_a_run_whose_steps_all_have_one_number_has_a_page(server: Running) -> None:
    """As after a step that had nothing to apply, or one that was taken again from a checkpoint."""
    run = ServiceClient(base_url=server.url, api_key=ALICE).create_lora_training_client(MODEL, timeout=20)
    run.forward_backward(DATA, "cross_entropy")
    for _ in range(2):
        run.optim_step(AdamParams(learning_rate=0.25)).result(20)
    answer = server.ask("GET", urlsplit(run.get_console_url()).path, headers=login(ALICE), key=None)
    assert answer.status == 200
    assert "svg" in Words(answer.body).tags
