"""Exports made on the server: what is written, who may have it, how many there may be, what is left over."""

from __future__ import annotations

import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import peft
import pytest
import torch
from playwright.sync_api import expect
from safetensors.torch import load_file

from tests.engine.llama_cpp import complete, merging_tokenizer
from tests.engine.oracle import reference_model
from tests.engine.tiny import tiny_model
from tests.server.browser import Tab
from tests.server.conftest import KEY, MODEL, Running
from tests.server.console_client import Browser
from tests.server.served import Serve
from tinkex import AdamParams, Datum, ModelInput, ServiceClient
from tinkex.server.api_keys import hash_key
from tinkex.server.console.export_pages import CheckpointExport
from tinkex.service.refusal import Refusal

pytestmark = pytest.mark.slow
ALICE, BOB = KEY["x-api-key"], "tml-bob"
SHOTS = os.environ.get("TINKEX_SCREENSHOTS")
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
IDS = [5, 9, 200, 31, 7]


# -- what is written -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merging_tokenizer(tiny_model(tmp_path_factory.mktemp("base"), "smollm2", intermediate_size=128))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Serve]:
    served = Serve(tmp_path_factory.mktemp("real"), model=base)
    yield served
    served.terminate(30)


@pytest.fixture(scope="module")
def trained(real: Serve, base: Path) -> Iterator[str]:
    """The path of an adapter that was trained."""
    service = ServiceClient(base_url=real.url, api_key="tml-local")
    run = service.create_lora_training_client(base.name, rank=4, name="to be exported")
    for _ in range(3):
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(AdamParams(learning_rate=0.05)).result(60)
    yield run.save_weights_for_sampler("final").result(60).path
    service.close().result(20)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.browser
@pytest.mark.parametrize("look", ["wide", "narrow", "dark"])
def test_an_export_is_written_and_downloaded(
    browser: Any, real: Serve, base: Path, trained: str, look: str, tmp_path: Path
) -> None:
    """In three formats: peft and transformers compute the same from them, and llama.cpp answers."""
    tab = Tab(
        browser, real.url, "narrow" if look == "narrow" else "wide", "dark" if look == "dark" else "light"
    )
    tab.log_in("tml-local")
    page = tab.go("/console/checkpoints")
    page.locator("li.saved", has_text=trained).get_by_role("link", name="Export").click()
    tab.check()

    def exported(kind: str) -> Path:
        page.select_option("#kind", kind)
        page.click("main form.stack button")
        ready = page.locator("#export", has_text="Ready: final-")
        expect(ready).to_be_visible(timeout=90_000)
        tab.check()
        if SHOTS and kind == "merged":
            page.screenshot(path=Path(SHOTS) / f"export-{look}.png", full_page=True)
        with page.expect_download() as told:
            page.get_by_role("link", name="Download").click()
        out = tmp_path / told.value.suggested_filename
        told.value.save_as(out)
        page.get_by_role("button", name="Remove").click()
        expect(ready).to_have_count(0)
        if out.suffix != ".tar":
            return out
        with tarfile.open(out) as archive:
            archive.extractall(tmp_path / out.stem, filter="data")
        return tmp_path / out.stem

    adapter = exported("peft")
    expected = logits(peft.PeftModel.from_pretrained(reference_model(base), str(adapter)))
    assert (expected - logits(reference_model(base))).abs().max() > 1e-3, "it was trained"
    merged = exported("merged")
    torch.testing.assert_close(logits(reference_model(merged)), expected, atol=1e-4, rtol=1e-4)
    assert load_file(merged / "model.safetensors")
    gguf = exported("gguf-q8_0")
    assert gguf.name == "final-gguf-q8_0.gguf"
    assert complete(gguf, IDS, count=2)
    assert not list((real.home / "archives").glob("*")), "what was removed is gone"


# -- what may be written -------------------------------------------------------------------------------------


class Saved:
    """An adapter of Alice's on a server whose engine computes nothing."""

    def __init__(self, server: Running, key: str = ALICE) -> None:
        service = ServiceClient(base_url=server.url, api_key=key)
        run = service.create_lora_training_client(MODEL, rank=4, timeout=20)
        self.server, self.run_id = server, run.model_id
        self.path = run.save_weights_for_sampler("final").result(20).path
        self.page = f"/console/runs/{run.model_id}/export"

    def show(self, browser: Browser) -> str:
        return browser.get(f"{self.page}?{urlencode({'path': self.path})}").body.decode()

    def ask(self, browser: Browser, verb: str, kind: str = "peft") -> Any:
        form = {"path": self.path, "kind": kind, "form_token": browser.token}
        return browser.post(f"{self.page}/{verb}", form)

    def until(self, browser: Browser, text: str) -> str:
        deadline = time.monotonic() + 60
        while text not in (page := self.show(browser)):
            assert time.monotonic() < deadline, page
            time.sleep(0.05)
        return page

    @property
    def left(self) -> list[Path]:
        return list((self.server.server.service.home.root / "archives").glob("*"))


class Writing:
    """Takes the place of what writes: waits until it may end, or is cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.begun = threading.Event(), threading.Semaphore(0)
        monkeypatch.setattr(CheckpointExport, "write", lambda export, *_: self.write(export))

    def write(self, export: CheckpointExport) -> None:
        export.done, export.total = 30, 120
        self.begun.release()
        while not self.go_on.wait(0.02):
            if export.cancelled:
                export.problem = "ended"
                return
        export.out.write_bytes(b"x" * 1000)


def test_what_needs_files_that_are_not_here_is_refused_and_the_page_says_so(server: Running) -> None:
    saved, alice = Saved(server), Browser(server, ALICE)
    page = saved.show(alice)
    assert "does not have the files of the base model m/base" in page
    assert 'value="peft"' in page
    assert 'value="merged"' not in page
    refused = saved.ask(alice, "begin", "gguf")
    assert (refused.status, b"does not have the files" in refused.body) == (422, True)
    assert saved.ask(alice, "begin", "zip").status == 422
    assert saved.left == []


def test_what_goes_wrong_is_told_and_leaves_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, alice = Saved(server), Browser(server, ALICE)
    row = server.server.service.ledger.checkpoint(saved.run_id, "sampler_weights", "final")
    assert row is not None
    for file in (server.server.service.home.root / row.directory).iterdir():
        file.write_bytes(b"damaged")
    assert saved.ask(alice, "begin").status == 303
    page = saved.until(alice, "It was not written:")
    assert str(server.server.service.home.root) not in page
    assert saved.left == []
    export = CheckpointExport(saved.path, "peft", Path("/nowhere/out"), cancelled=True)
    export.write(Path("/nowhere"), None, "")
    assert export.problem == "the process that wrote it was ended"
    monkeypatch.setattr(server.server.service.home, "check_disk", full)
    answer = saved.ask(alice, "begin")
    assert (answer.status, b"disk is full" in answer.body, saved.left) == (503, True, [])


def full(needed: int = 0) -> None:
    raise Refusal(503, "the server's disk is full")


def test_a_user_has_one_export_and_all_have_two_at_a_time(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, keys = Writing(monkeypatch), (ALICE, BOB, "tml-carol")
    each = [(Saved(server, key), Browser(server, key)) for key in keys]
    (first, alice), (second, bob), (third, carol) = each
    assert first.ask(alice, "begin").status == 303
    assert writing.begun.acquire(timeout=20)
    assert "30 B of 120 B" in first.show(alice)
    again = first.ask(alice, "begin")
    assert (again.status, b"an export of yours is being written" in again.body) == (429, True)
    assert second.ask(bob, "begin").status == 303
    refused = third.ask(carol, "begin")
    assert (refused.status, b"2 exports are being written" in refused.body) == (429, True)
    assert first.ask(alice, "remove").status == 303  # while it is written
    assert "30 B of" not in first.show(alice)
    assert third.ask(carol, "begin").status == 303
    writing.go_on.set()
    for saved, browser in each[1:]:
        saved.until(browser, "Ready: final-peft")
    answer = second.server.ask("GET", f"{second.page}/file", headers={"cookie": bob.cookie}, key=None)
    assert (answer.status, answer.body) == (200, b"x" * 1000)
    assert "attachment" in answer.headers["content-disposition"]
    assert len(first.left) == 2
    assert second.ask(bob, "begin").status == 303  # in the place of the last one
    second.until(bob, "Ready: final-peft")
    assert len(first.left) == 2
    for saved, browser in each[1:]:
        assert saved.ask(browser, "remove").status == 303
    assert first.left == []


def test_an_export_is_its_users_and_is_gone_after_an_hour(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writing(monkeypatch).go_on.set()
    saved, alice, bob = Saved(server), Browser(server, ALICE), Browser(server, BOB)
    assert saved.ask(alice, "begin").status == 303
    saved.until(alice, "Ready: final-peft")
    own = Saved(server, BOB)
    assert "Ready" not in own.show(bob)
    for page in (saved.page, own.page):
        assert bob.get(f"{page}/file").status == 404
    assert "not exist" in saved.show(bob)
    for verb in ("begin", "remove"):
        assert saved.ask(bob, verb).status == 404
    events = [one.event for one in server.server.service.ledger.latest_audit(limit=20, offset=0)]
    assert "checkpoints.export" in events
    (place,) = saved.left
    long_ago = time.time() - 3601
    os.utime(place, (long_ago, long_ago))
    server.server.service.archives.sweep()
    assert alice.get(f"{saved.page}/file").status == 404
    assert "Ready" not in saved.show(alice)


def test_a_colleague_of_the_project_exports_too_and_an_encrypted_checkpoint_is_refused(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    Writing(monkeypatch).go_on.set()
    server = start()
    ledger = server.server.service.ledger
    for name in ("ann", "bob"):
        ledger.add_key(
            name=name, note="", hash=hash_key(f"tml-{name}"), owner=name, project_id="p", created_at=1.0
        )
    saved, bob = Saved(server, "tml-ann"), Browser(server, "tml-bob")
    assert saved.ask(bob, "begin").status == 303
    saved.until(bob, "Ready: final-peft")
    row = ledger.checkpoint(saved.run_id, "sampler_weights", "final")
    assert row is not None
    encrypted = replace(row, encrypted=True)
    monkeypatch.setattr(ledger, "checkpoint", lambda *_: encrypted)
    answer = saved.ask(bob, "begin")
    assert (answer.status, b"is encrypted" in answer.body) == (422, True)
