"""The console of several servers on one ledger: any of them shows a run, and a logout counts at all."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from urllib.parse import urlencode

import pytest

import tinkex
from tests.cloud.members import MODEL, MemberProcess, eventually
from tinkex.types import AdamParams, Datum, ModelInput

pytestmark = pytest.mark.slow
DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow nothing."""


def ask(url: str, form: dict[str, str] | None = None, cookie: str = "") -> tuple[int, str, dict[str, str]]:
    body = None if form is None else urlencode(form).encode()
    request = urllib.request.Request(url, body, {"accept": "text/html", "cookie": cookie})
    try:
        with urllib.request.build_opener(_Stays).open(request, timeout=20) as response:
            head = {name.lower(): value for name, value in response.headers.items()}
            if "event-stream" in head.get("content-type", ""):
                return response.status, response.readline().decode(), head
            return response.status, response.read().decode(), head
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), {k.lower(): v for k, v in error.headers.items()}


def test_any_server_shows_a_run_and_a_logout_counts_everywhere(postgres, s3, tmp_path):
    options = ("--ledger", postgres, "--store", s3, "--lease", "5")
    owner, other = (MemberProcess(tmp_path / name, *options) for name in ("a", "b"))
    try:
        service = tinkex.ServiceClient(base_url=owner.url, api_key="tml-x")
        run = service.create_lora_training_client(MODEL, rank=4, name="of the first")
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(AdamParams()).result(timeout=60)
        cookie = ask(f"{other.url}/console/login", {"key": "tml-x"})[2]["set-cookie"].partition(";")[0]
        page = f"{other.url}/console/runs/{run.model_id}"
        status, body, head = ask(page, cookie=cookie)
        assert (status, "of the first" in body) == (200, True)
        assert "default-src 'none'" in head["content-security-policy"]
        assert '"loss"' in ask(f"{page}/curves", cookie=cookie)[1], "the file is the first server's"
        assert ask(f"{page}/events", cookie=cookie)[1].startswith("event: points")
        token = re.findall(r'data-form-token="(\w+)"', body)[0]
        changed = ask(f"{page}/rename", {"name": "renamed", "tags": "", "form_token": token}, cookie)
        assert (changed[0], changed[2]["location"]) == (303, f"/console/runs/{run.model_id}")
        assert "renamed" in ask(f"{owner.url}/console/runs/{run.model_id}", cookie=cookie)[1]
        assert ask(f"{page}/rename", {"name": "forged", "tags": ""}, cookie)[0] == 403
        assert ask(f"{other.url}/console/runs/none:train:0", cookie=cookie)[0] == 404
        second = tinkex.ServiceClient(base_url=other.url, api_key="tml-x")
        its = second.create_lora_training_client(MODEL, rank=4, name="of the second")
        its.forward_backward(DATA, "cross_entropy")
        its.optim_step(AdamParams()).result(timeout=60)
        both = [run.model_id, its.model_id]
        body = ask(f"{other.url}/console/compare?run={both[0]}&run={both[1]}", cookie=cookie)[1]
        assert 'data-together="1"' in body, "each run's curves are asked for alone, and come from its server"
        assert "The final metrics of 1 of these runs are at other servers" in body
        for n, run_id in enumerate(both):
            told = ask(f"{other.url}/console/compare/curves?run={run_id}&first={n}&of=2", cookie=cookie)[1]
            assert f'"loss@{n}"' in told
        path = run.save_weights_for_sampler("s").result(timeout=60).path
        form = {"path": path, "kind": "peft", "form_token": token}
        assert ask(f"{page}/export/begin", form, cookie)[0] == 303
        eventually(lambda: "Ready: s-peft" in ask(f"{page}/export?{urlencode(form)}", cookie=cookie)[1], 60)
        second.close()
        assert ask(f"{other.url}/console/logout", {"form_token": token}, cookie)[0] == 303
        eventually(lambda: ask(f"{owner.url}/console/runs", cookie=cookie)[0] == 303, 20)
        service.close()
    finally:
        owner.end()
        other.end()
