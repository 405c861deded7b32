"""Rollouts of a run: prompts and their answers by step, token by token, with what training made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.console_data import ConsoleData
from tinkex.server.console.site import ConsoleSite, as_json, page_of
from tinkex.server.console.token_texts import TokenTexts, pieces, text_of, top_texts
from tinkex.server.console.visitors import Visitor
from tinkex.service.refusal import Refusal, not_found
from tinkex.service.rollout_reader import RolloutReader, RolloutSummary, SampleSummary
from tinkex.service.rows import RunRow

GROUPS = 50  # of one page
MOST_SAMPLES = 64  # of a group that are shown
LISTED = 16  # of a group, in the table of groups
SEARCHED = 1000  # groups whose prompts are searched for a text
PREVIEW = 160  # characters of a prompt in the list


class ShownSample(NamedTuple):
    """One answer of a group, and how its tokens are found."""

    rollout: RolloutSummary
    number: int
    summary: SampleSummary


class RolloutGroup(NamedTuple):
    """All answers to one prompt at one step."""

    group: str
    step: int
    samples: list[ShownSample]

    @property
    def advantages(self) -> list[float]:
        return [s.summary.advantage for s in self.samples if s.summary.advantage is not None]

    @property
    def tokens(self) -> float:
        return sum(s.summary.tokens for s in self.samples) / max(1, len(self.samples))

    @property
    def logprob(self) -> float | None:
        return _mean([s.summary.logprob for s in self.samples])

    @property
    def difference(self) -> float | None:
        return _mean([s.summary.difference for s in self.samples])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


ORDERS: dict[str, Callable[[RolloutGroup], float]] = {
    "step": lambda group: group.step,
    "spread": lambda group: max(group.advantages, default=0.0) - min(group.advantages, default=0.0),
    "length": lambda group: group.tokens,
    "lowest logprob": lambda group: -(group.logprob or 0.0),
    "difference": lambda group: group.difference or 0.0,
}


def _matches(group: RolloutGroup, query: dict[str, str]) -> bool:
    """Is it what the page's filters ask for?"""
    sign, stop = {"+": 1, "-": -1}.get(query["sign"], 0), query["stop"]
    return (
        query["step"] in ("", str(group.step))
        and (not query["trained"] or bool(group.advantages))
        and (not sign or any(one * sign > 0 for one in group.advantages))
        and (not stop or any(one.summary.stop == stop for one in group.samples))
    )


def _preview(text: str) -> str:
    return text if len(text) <= PREVIEW else f"… {text[-PREVIEW:].lstrip()}"


class RolloutPages:
    """Pages about the rollouts of one run."""

    def __init__(self, site: ConsoleSite, data: ConsoleData, texts: TokenTexts, rate: float) -> None:
        self._site, self._data, self._texts, self._rate = site, data, texts, rate
        self._reader = RolloutReader()
        site.add("/console/runs/{run_id}/rollouts", self.list)
        site.add("/console/runs/{run_id}/rollouts/{group}", self.show)
        site.add("/console/runs/{run_id}/rollouts/{group}/tokens", self.tokens)

    async def _groups(self, row: RunRow) -> list[RolloutGroup]:
        rollouts = await self._site.off_loop(self._reader.list, self._data.directory(row))
        found: defaultdict[tuple[int, str], list[ShownSample]] = defaultdict(list)
        for one in rollouts:
            found[one.step, one.group] += [ShownSample(one, i, s) for i, s in enumerate(one.samples)]
        return [RolloutGroup(group, step, samples) for (step, group), samples in found.items()]

    async def list(self, request: Request, visitor: Visitor) -> Response:
        run, given = self._data.run(request.path_params["run_id"], visitor), request.query_params
        groups, (number, offset) = await self._groups(run.row), page_of(request, GROUPS)
        steps = sorted({group.step for group in groups})
        stops = sorted({one.summary.stop for group in groups for one in group.samples})
        query = {name: given.get(name, "") for name in ("step", "trained", "sign", "stop", "text", "order")}
        groups = [group for group in groups if _matches(group, query)]
        groups.sort(key=ORDERS.get(query["order"], ORDERS["step"]), reverse=True)
        table = await self._texts.table(run.row.base_model)
        if query["text"]:
            groups = await self._site.off_loop(self._with_text, groups[:SEARCHED], query["text"], table)
        shown = groups[offset : offset + GROUPS]
        prompts = await self._site.off_loop(lambda: [_preview(self._prompt(one, table)) for one in shown])
        return self._site.render(
            "rollouts.html", visitor, run=run, groups=list(zip(shown, prompts, strict=True)),
            total=len(groups), steps=steps, stops=stops, query=query, orders=[*ORDERS], rate=self._rate,
            page=number, pages=max(1, -(-len(groups) // GROUPS)), searched=SEARCHED, most=LISTED,
        )  # fmt: skip

    def _prompt(self, group: RolloutGroup, table: Any) -> str:
        try:
            return " ".join(text_of(self._reader.prompt(group.samples[0].rollout), table).split())
        except (OSError, ValueError):
            return "dropped meanwhile"

    def _with_text(self, groups: list[RolloutGroup], text: str, table: Any) -> list[RolloutGroup]:
        wanted = " ".join(text.split()).casefold()
        return [group for group in groups if wanted in self._prompt(group, table).casefold()]

    async def show(self, request: Request, visitor: Visitor) -> Response:
        run, wanted = self._data.run(request.path_params["run_id"], visitor), request.path_params["group"]
        groups = [group for group in await self._groups(run.row) if group.group == wanted]
        if not groups:
            raise not_found(f"a rollout {wanted} of run {run.row.run_id}")
        groups.sort(key=lambda group: group.step)
        steps = [group.step for group in groups]
        at, step = (request.query_params.get(name, "") for name in ("at", "step"))
        index = min(int(at), len(steps) - 1) if at.isdecimal() and len(at) < 9 else len(steps) - 1
        if step.isdecimal() and len(step) < 9 and int(step) in steps:
            index = steps.index(int(step))
        part = request.headers.get("hx-target") == "group"
        group = groups[index]._replace(samples=groups[index].samples[:MOST_SAMPLES])
        return self._site.render(
            "_group.html" if part else "group.html", visitor, run=run, group=group, steps=steps, index=index
        )

    async def tokens(self, request: Request, visitor: Visitor) -> Response:
        row, given = self._data.row(request.path_params["run_id"], visitor), request.query_params
        rollouts = await self._site.off_loop(self._reader.list, self._data.directory(row))
        number, sample = given.get("id", ""), given.get("sample", "0")
        found = next((one for one in rollouts if str(one.id) == number), None)
        if found is None or not sample.isdecimal() or int(sample) >= len(found.samples):
            raise not_found(f"rollout {number!r:.40} of run {row.run_id}")
        try:
            record = await self._site.off_loop(self._reader.record, found, int(sample))
        except (OSError, ValueError) as error:
            raise Refusal(404, "this rollout was dropped meanwhile: newer ones took its room") from error
        table = await self._texts.table(row.base_model)
        joined: dict[str, Any] = record.get("joined", {})
        return as_json({
            "prompt": pieces(record["prompt"], table), "answer": pieces(record["tokens"], table),
            "ids": record["tokens"], "logprobs": record.get("logprobs"),
            "top": top_texts(record.get("topk") or [], table),
            **{name: joined.get(name) for name in ("trainer", "advantage", "advantages")},
        })  # fmt: skip
