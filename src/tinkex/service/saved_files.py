"""The directories of saved adapters: in the home, or in a store that the home only stages for.

A place is a relative path, as the ledger keeps it. In a store every save has its own place, written once
(`runs/S/train-0/weights/NAME~1a2b3c4d`), so that a late write by an old owner does no harm. The engine reads
and writes directories of this machine; uploads and downloads are done on threads, and checksums are verified.
Knows nothing of rows or of who may read what.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from tinkex import store
from tinkex.engine.protocol import EngineError
from tinkex.service.archive import LINK_LIFE, Archive, Link
from tinkex.service.home import TAG, Home
from tinkex.service.refusal import Caller

ARCHIVES = "archives"  # in a store: EXPIRY-DIGEST.tar


class SavedFiles:
    """Files by their places, below `root`: the home, or the location of a store."""

    def __init__(self, home: Home, root: str, link: Link) -> None:
        self._home, self._link = home, link
        self.root = root
        self.in_store = root != str(home.root)
        self._remote = store.is_remote(root)
        self._staging = home.root / "staged"

    def location(self, place: str) -> str:
        return store.join(self.root, place)

    def new_place(self, directory: Path) -> str:
        """Where the next save of what `directory` names in the home goes."""
        place = self._home.relative(directory)
        return f"{place}{TAG}{uuid.uuid4().hex[:8]}" if self.in_store else place

    def clear_unfinished(self) -> None:
        """Remove what a killed process was about to upload, or had downloaded."""
        shutil.rmtree(self._staging, ignore_errors=True)

    # -- directories -------------------------------------------------------------------------------------

    async def write(self, place: str, write: Callable[[Path], Awaitable[int]]) -> int:
        """Have `write` make a directory, and keep that at `place`; returns what `write` returns."""
        if not self._remote:
            return await write(Path(self.location(place)))
        async with self._staged() as directory:
            size = await write(directory)
            await asyncio.to_thread(store.upload, directory, self.location(place))
            return size

    async def upload(self, directory: Path, place: str) -> None:
        """Copy a directory of this machine to a place."""
        await asyncio.to_thread(store.upload, directory, self.location(place))

    @contextlib.asynccontextmanager
    async def read(self, place: str) -> AsyncGenerator[Path]:
        """The directory at `place`, on this machine; EngineError (user) if it is missing or damaged."""
        if not self._remote:
            yield Path(self.location(place))
            return
        async with self._staged() as directory:
            try:
                await asyncio.to_thread(store.download, self.location(place), directory)
            except (store.DamagedError, FileNotFoundError) as error:
                raise EngineError(str(error), "user") from None
            yield directory

    @contextlib.asynccontextmanager
    async def _staged(self) -> AsyncGenerator[Path]:
        directory = self._staging / uuid.uuid4().hex
        try:
            yield directory
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, True)

    async def copy(self, source: str, target: str) -> None:
        await asyncio.to_thread(store.copy_directory, self.location(source), self.location(target))

    async def remove(self, place: str) -> None:
        await asyncio.to_thread(store.remove, self.location(place))

    # -- links -------------------------------------------------------------------------------------------

    async def links(self, caller: Caller, place: str, expires: float, *, suffix: str = "") -> dict[str, str]:
        """A link to each file at `place` whose name ends with `suffix`, by its name."""

        def sign() -> dict[str, str]:
            names = sorted(name for name in store.files(self.location(place)) if name.endswith(suffix))
            return {name: self._sign(caller, f"{place}/{name}", expires) for name in names}

        return await asyncio.to_thread(sign)

    async def archive(self, caller: Caller, place: str, expires: float) -> str:
        """A link to a tar file of what is at `place`."""
        if not self._remote:
            return await asyncio.to_thread(self._link, caller, Path(self.location(place)), expires)
        return await asyncio.to_thread(self._archive, place, expires)

    def _archive(self, place: str, expires: float) -> str:
        """Have the tar file in the store, until no link to it works: the server need not send it."""
        digest = hashlib.sha256(place.encode()).hexdigest()[:32]
        self.sweep_archives(digest)
        name = f"{ARCHIVES}/{int(expires) + 60}-{digest}.tar"
        self._staging.mkdir(parents=True, exist_ok=True)
        packed = self._staging / uuid.uuid4().hex
        try:
            with store.local_copy(self.location(place)) as directory, packed.open("wb") as out:
                out.writelines(Archive(directory))
            store.write_file(packed, self.location(name))
        finally:
            packed.unlink(missing_ok=True)
        return store.link(self.location(name), expires - time.time())

    def sweep_archives(self, digest: str = "-") -> None:
        """Remove the tar files whose links no longer work, and those of one digest."""
        if not self._remote:
            return
        for name in store.files(self.location(ARCHIVES)):
            until, _, whose = name.removesuffix(".tar").partition("-")
            if whose == digest or (until.isdigit() and int(until) < time.time()):
                store.remove_file(self.location(f"{ARCHIVES}/{name}"))

    async def forget_archive(self, place: str) -> None:
        await asyncio.to_thread(self.sweep_archives, hashlib.sha256(place.encode()).hexdigest()[:32])

    async def link_to_file(self, caller: Caller, place: str, write: Callable[[Path], None]) -> str:
        """Let `write` make one file; a link to it, which lives as long as links do."""

        def make() -> str:
            local = self._staging / uuid.uuid4().hex if self._remote else Path(self.location(place))
            local.parent.mkdir(parents=True, exist_ok=True)
            write(local)
            if self._remote:
                store.write_file(local, self.location(place))
                local.unlink()
            return self._sign(caller, place, time.time() + LINK_LIFE)

        return await asyncio.to_thread(make)

    def remove_file(self, place: str) -> None:
        store.remove_file(self.location(place))

    def _sign(self, caller: Caller, place: str, expires: float) -> str:
        if self._remote:
            return store.link(self.location(place), expires - time.time())
        return self._link(caller, Path(self.location(place)), expires)
