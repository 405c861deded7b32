"""Exports of checkpoints: written on the server by a process of its own, and downloaded from a page.

A user has one export at a time, and it can be downloaded for an hour. Nothing is fetched for it: what needs
the files of a base model that this server does not have is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tinkex.config import child_environment
from tinkex.engine.protocol import EngineError
from tinkex.models import local_files
from tinkex.server.console.console_data import ConsoleData
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.visitors import Visitor
from tinkex.server.downloads import tar_response
from tinkex.service.refusal import Refusal, not_found
from tinkex.service.rows import CheckpointRow
from tinkex.service.served_models import in_daemon_thread
from tinkex.service.service import Service
from tinkex.store import directory_bytes
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

MOST = 2  # exports that are written at a time, of all users
KINDS = {  # what is offered: its name, the format, how it is quantised, the file's ending
    "peft": ("PEFT adapter", "peft", None, ""),
    "merged": ("Merged weights, for transformers", "merged", None, ""),
    "gguf": ("GGUF, for llama.cpp and Ollama", "gguf", None, ".gguf"),
    "gguf-q8_0": ("GGUF, q8_0", "gguf", "q8_0", ".gguf"),
    "gguf-q6_k": ("GGUF, q6_k", "gguf", "q6_k", ".gguf"),
    "gguf-q4_k_m": ("GGUF, q4_k_m", "gguf", "q4_k_m", ".gguf"),
    "mlx": ("MLX", "mlx", None, ""),
    "mlx-q4": ("MLX, q4", "mlx", "q4", ""),
}


@dataclass(eq=False)
class CheckpointExport:
    """One export of a user's, while it is written and after."""

    path: str
    kind: str
    out: Path
    done: int = 0
    total: int = 0
    problem: str = ""
    ended: bool = False
    cancelled: bool = False
    process: subprocess.Popen[str] | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        return KINDS[self.kind][0]

    @property
    def run_id(self) -> str:
        return ParsedCheckpointTinkerPath.from_tinker_path(self.path).training_run_id

    @property
    def size(self) -> int:
        return directory_bytes(self.out) if self.out.is_dir() else self.out.stat().st_size

    def write(self, adapter: Path, base: str | None, base_name: str) -> None:
        """Have the process write it; blocks."""
        command = [sys.executable, "-m", "tinkex.export_process"]
        # As for other processes of ours, Ctrl-C goes to the server alone. A GPU is the engine's.
        self.process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=child_environment(CUDA_VISIBLE_DEVICES=""), start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        _, format, quantize, _ = KINDS[self.kind]
        told = {"adapter": str(adapter), "out": str(self.out), "format": format, "quantize": quantize}
        written = False
        if self.cancelled:
            process.kill()
        with process:
            process.stdin.write(json.dumps(told | {"base": base, "base_name": base_name}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said: dict[str, Any] = json.loads(line)
                self.done, self.total = said.get("done", self.done), said.get("total", self.total)
                self.problem, written = said.get("problem", ""), "written" in said
                os.utime(self.out.parent)  # else it is taken for left over
        if not written and not self.problem:
            self.problem = "the process that wrote it was ended"

    def cancel(self) -> None:
        self.cancelled = True
        if self.process is not None:
            self.process.kill()


class ExportPages:
    """The page of a run's exports, and what is done there."""

    def __init__(self, site: ConsoleSite, data: ConsoleData, service: Service) -> None:
        self._site, self._data, self._service = site, data, service
        self._exports: dict[str, CheckpointExport] = {}  # by user
        self._beginning = asyncio.Lock()  # one is counted before the next begins
        place = "/console/runs/{run_id}/export"
        site.add(place, self.show)
        site.add(f"{place}/begin", self.begin, "POST")
        site.add(f"{place}/remove", self.remove, "POST")
        site.add(f"{place}/file", self.download)

    def _checkpoint(self, request: Request, visitor: Visitor, path: str) -> CheckpointRow:
        """What may be exported: adapters of this run that the visitor may read."""
        run_id = request.path_params["run_id"]
        self._data.row(run_id, visitor)
        row = self._service.access.checkpoint(path, visitor.caller)
        if row.run_id != run_id or row.kind == "external_weights":
            raise not_found(f"an adapter {path} of run {run_id}")
        return row

    def _base(self, row: CheckpointRow) -> Path | None:
        """The base model's files, if they are here."""
        try:
            return local_files.model_at(self._service.models.find(row.base_model).place)
        except Refusal:
            return None

    def _own(self, visitor: Visitor) -> CheckpointExport | None:
        found = self._exports.get(visitor.name)
        if found is not None and found.ended and not found.problem and not found.out.exists():
            del self._exports[visitor.name]  # its time was over
            return None
        return found

    async def show(self, request: Request, visitor: Visitor) -> Response:
        row = self._checkpoint(request, visitor, request.query_params.get("path", ""))
        export = self._own(visitor)
        size = await self._site.off_loop(lambda: export.size) if export and _can_be_sent(export) else 0
        return self._site.render(
            "export.html", visitor, row=row, export=export, size=size, kinds=KINDS, base=self._base(row)
        )

    async def begin(self, request: Request, visitor: Visitor) -> Response:
        form = await self._site.form(request)
        row, kind = self._checkpoint(request, visitor, form.get("path", "")), form.get("kind", "")
        if kind not in KINDS:
            raise Refusal(422, f"kind is {kind!r:.40}; allowed: {', '.join(KINDS)}")
        if row.encrypted:
            raise Refusal(422, "this checkpoint is encrypted: only its recipients can export it")
        base = self._base(row)
        if base is None and kind != "peft":
            raise Refusal(422, f"this server does not have the files of the base model {row.base_model}")
        async with self._beginning:
            await self._make_room(row, None if kind == "peft" else base, visitor)
            _, format, quantize, ending = KINDS[kind]
            place = await self._site.off_loop(self._service.archives.room, f"export-{time.time_ns()}")
            out = place / ("-".join(part for part in (row.name, format, quantize) if part) + ending)
            export = self._exports[visitor.name] = CheckpointExport(row.tinker_path, kind, out)
            export.task = asyncio.ensure_future(self._write(export, row, base))
        self._service.activity.audit(
            visitor.caller, "checkpoints.export", tinker_path=row.tinker_path, details={"what": kind}
        )
        return self._back(request, row.tinker_path)

    async def _make_room(self, row: CheckpointRow, base: Path | None, visitor: Visitor) -> None:
        """Remove the user's last export; Refusal if another one would be too many, or too much."""
        under_way = [one for one in self._exports.values() if not one.ended]
        if self._own(visitor) in under_way:
            raise Refusal(429, "an export of yours is being written: wait for it, or cancel it")
        if len(under_way) >= MOST:
            raise Refusal(429, f"{MOST} exports are being written: try again when one is done")
        home, needed = self._service.home, row.size_bytes
        if base is not None:
            needed += await self._site.off_loop(_bytes, base)
        await self._forget(visitor)
        home.check_disk(needed)
        if why := await home.over_quota(needed, visitor.name):
            raise Refusal(422, why)

    async def _write(self, export: CheckpointExport, row: CheckpointRow, base: Path | None) -> None:
        """What went wrong is told on the page. Weights are not compared where an engine quantised them."""
        trusted = str(base) if base and self._service.config.engine.quantize != "none" else None
        name = row.base_model if base is None else str(base)
        if export.kind == "peft":
            trusted, name = None, row.base_model
        try:
            async with self._service.files.read(row.directory) as adapter:
                await in_daemon_thread(lambda: export.write(adapter, trusted, name))
        except (Refusal, EngineError, OSError) as error:
            export.problem = str(error)
        finally:
            export.cancel()
            export.ended = True
        if export.problem:
            export.problem = self._site.clean(export.problem)
            await self._site.off_loop(self._service.archives.remove, export.out.parent)

    async def remove(self, request: Request, visitor: Visitor) -> Response:
        """Cancel an export, or remove what was written."""
        path = (await self._site.form(request)).get("path", "")
        self._checkpoint(request, visitor, path)
        await self._forget(visitor)
        return self._back(request, path)

    async def _forget(self, visitor: Visitor) -> None:
        export = self._exports.pop(visitor.name, None)
        if export is not None:
            export.cancel()
            if export.task is not None:
                await asyncio.wait([export.task])
            await self._site.off_loop(self._service.archives.remove, export.out.parent)

    async def download(self, request: Request, visitor: Visitor) -> Response:
        export = self._own(visitor)
        if export is None or not _can_be_sent(export):
            raise Refusal(404, "there is no export of yours: it was removed, or an hour has passed")
        self._checkpoint(request, visitor, export.path)
        if export.out.is_dir():
            return await self._site.off_loop(tar_response, export.out)
        return FileResponse(export.out, media_type="application/octet-stream", filename=export.out.name)

    def _back(self, request: Request, path: str) -> Response:
        run_id = request.path_params["run_id"]
        return self._site.redirect(f"/console/runs/{run_id}/export?{urlencode({'path': path})}", request)


def _can_be_sent(export: CheckpointExport) -> bool:
    return export.ended and not export.problem


def _bytes(base: Path) -> int:
    return directory_bytes(base) if base.is_dir() else 2 * base.stat().st_size
