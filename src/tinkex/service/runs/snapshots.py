"""The files of snapshots: in a run's journal, and in the store too where several servers share it.

A committed snapshot is durable: on the disk, or as objects of the store with a record of where they are
(`stored`).
Knows nothing of when one is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home
from tinkex.service.saved_files import SavedFiles
from tinkex.store import add_checksums, sync_tree

SNAPSHOT = "adapter"  # the directory inside a snapshot
STORED = "stored"  # a file inside a snapshot: its place in a store


class Snapshots:
    """Keeps and reads them; `shared`: another server must find them too."""

    def __init__(self, home: Home, files: SavedFiles, disk: GroupCommit, *, shared: bool) -> None:
        self._home, self._files, self._disk, self.shared = home, files, disk, shared

    async def keep(self, run_id: str, part: Path) -> None:
        """Before it counts: its files are on the disk, or in the store."""
        await asyncio.to_thread(add_checksums, part / SNAPSHOT)
        if not self.shared:
            await asyncio.to_thread(sync_tree, part)
            return
        place = self._files.new_place(self._home.run_dir(run_id) / "snapshots" / part.name)
        await self._files.upload(part / SNAPSHOT, place)
        (part / STORED).write_text(place)

    def place_of(self, snapshot: Path | None) -> str:
        """Where a snapshot is in the store; "" if it is not."""
        file = None if snapshot is None else snapshot / STORED
        return file.read_text() if file is not None and file.exists() else ""

    async def replaced(self, before: str, snapshot: Path | None) -> None:
        """A newer snapshot counts: the one before may go once another server would know that."""
        if self.shared and snapshot is not None:
            self._disk.wrote(snapshot / STORED)
            await self._disk.synced()
            if before:
                await self._files.remove(before)

    @contextlib.asynccontextmanager
    async def read(self, snapshot: Path) -> AsyncGenerator[Path]:
        """The adapter of a snapshot, on this machine."""
        if (snapshot / SNAPSHOT).is_dir():
            yield snapshot / SNAPSHOT
            return
        async with self._files.read(self.place_of(snapshot)) as directory:
            yield directory
