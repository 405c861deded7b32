"""The home directory: its lock, its layout, its free space, and what a killed process left half-written.

One process at a time serves a home. Knows which files belong to a run; knows nothing of what is in them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from tinkex.errors import TinkerError
from tinkex.files import try_lock
from tinkex.service.refusal import Refusal
from tinkex.store import directory_bytes

DISK_RESERVE = 64 * 1024 * 1024  # bytes kept free for the ledger and the journals
SPARE = "spare"  # a file that is given up when the disk is full, so that there is room to delete
SPARE_BYTES = 1024 * 1024
TAG = "~"  # in a store every save has a directory of its own: NAME~RANDOM
DISK_LOOK = 1.0  # seconds for which a reading of the disk's free space is believed


def prepare(root: Path) -> None:
    """Make a home's directory, for its owner alone; on a full disk, make room to open its ledger."""
    root.mkdir(0o700, parents=True, exist_ok=True)
    mode = root.stat().st_mode
    if (root / "ledger.sqlite").exists() and mode & 0o077 and not mode & stat.S_ISVTX:
        with suppress(OSError):  # another user's
            root.chmod(0o700)
    free_spare(root)


def free_spare(root: Path) -> None:
    """On a full disk, give up the spare file: SQLite needs a few pages even to open or to delete."""
    if shutil.disk_usage(root).free < SPARE_BYTES:
        (root / SPARE).unlink(missing_ok=True)


class Home:
    """The directory `root`, and how much may be kept in it."""

    def __init__(
        self,
        root: Path,
        quota: int | None = None,
        per_user: int | None = None,
        sessions_of: Callable[[str], list[str]] = lambda user: [],
        stored: Callable[[str], int] = lambda user: 0,
    ) -> None:
        self.root = root
        self.quota = quota
        self.per_user = per_user
        self._sessions_of, self._stored = sessions_of, stored
        self._lock: int | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free: tuple[float, int] = (0.0, 0)  # when it was read, bytes
        self._written: defaultdict[str, int] = defaultdict(int)  # counted by `count`; by user, "": by all
        self._measured: dict[str, tuple[float, int, int]] = {}  # when, bytes found, `_written` by then
        root.mkdir(0o700, parents=True, exist_ok=True)

    # -- one process at a time ---------------------------------------------------------------------------

    def lock(self) -> None:
        """Become the process that serves this home; TinkerError if another one does."""
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(descriptor):
            os.close(descriptor)
            raise TinkerError(
                f"{self.root} is in use by another process; end it, or use another home (TINKEX_HOME)"
            )
        self._lock = descriptor

    @property
    def is_ours(self) -> bool:
        """Does this process serve it?"""
        return self._lock is not None

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear_unfinished(self) -> None:
        """Remove what a killed process was writing: it never got its name.

        A directory about to be replaced, named .NAME.NUMBER.old, gets its name back if nothing has it.
        """
        for replaced in self.root.glob("runs/*/*/*/.*.old"):
            place = replaced.with_name(replaced.name[1:].rsplit(".", 2)[0])
            if place.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(place)
        for pattern in ("runs/*/*/*/.*.tmp", "runs/*/*/*/.*.part", "runs/*/*/journal.deleted"):
            for unfinished in self.root.glob(pattern):
                shutil.rmtree(unfinished, ignore_errors=True)

    # -- layout ------------------------------------------------------------------------------------------

    def run_dir(self, run_id: str) -> Path:
        """`runs/<session>/train-<n>`: no colons, which some file systems do not take."""
        session_id, _, number = run_id.rpartition(":train:")
        return self.root / "runs" / session_id / f"train-{number}"

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def locked(self, directory: str) -> asyncio.Lock:
        """The lock for writing, removing or reading a checkpoint: its row and its files change together."""
        named = directory.partition(TAG)[0]
        if (lock := self._locks.get(named)) is None:
            lock = self._locks[named] = asyncio.Lock()
        return lock

    # -- space -------------------------------------------------------------------------------------------

    def keep_spare(self) -> None:
        """Write the spare file again, as soon as there is room for it."""
        spare = self.root / SPARE
        if not spare.exists() and shutil.disk_usage(self.root).free >= DISK_RESERVE:
            with suppress(OSError):
                spare.write_bytes(os.urandom(SPARE_BYTES))  # zeros might take no room

    def check_disk(self, needed: int = 0) -> None:
        """Refuse what the disk has no room for."""
        read_at, free = self._free
        if needed or time.monotonic() - read_at > DISK_LOOK:
            free = shutil.disk_usage(self.root).free
            self._free = time.monotonic(), free
        if free < needed + DISK_RESERVE:
            raise Refusal(503, f"the server's disk is full ({free // 2**20} MiB left); nothing was lost")

    @property
    def limited(self) -> bool:
        return self.quota is not None or self.per_user is not None

    def count(self, user: str, size: int) -> None:
        """So many bytes were written for `user`. What is deleted is seen when the files are next measured."""
        for whose in (user, ""):
            self._written[whose] += size

    async def over_quota(self, more: int, user: str) -> str:
        """Return why `user` may not write `more` bytes, or "".

        Uses the last measurement plus the bytes written since; measures again when that is old or exceeds the
        quota.
        """
        why = ""
        if self.quota is not None:
            why = await self._over("", self.quota, more)
        if self.per_user is not None and not why:
            why = await self._over(user, self.per_user, more)
        return why

    async def _over(self, user: str, limit: int, more: int) -> str:
        measured_at, found, since = self._measured.get(user, (0.0, 0, 0))
        used = found + self._written[user] - since
        patience = DISK_LOOK if used > limit // 2 else 10 * DISK_LOOK if user else DISK_LOOK
        if used + more > limit or time.monotonic() - measured_at > patience:
            for _ in range(3):
                since = self._written[user]
                found = self._stored(user) + await asyncio.to_thread(self._measure, user)
                self._measured[user] = time.monotonic(), found, since
                used = found + self._written[user] - since
                if used + more <= limit or used == found:
                    break  # else what was written meanwhile may be in both numbers
        if used + more <= limit:
            return ""
        whose = f"the files of {user}" if user else "the server's files"
        return (
            f"{whose} take {used} of the {limit} bytes allowed, {more} more do not fit; "
            "delete some checkpoints"
        )

    def _measure(self, user: str) -> int:
        places = [self.root / "runs" / s for s in self._sessions_of(user)] if user else [self.root]
        return sum(directory_bytes(place) for place in places if place.exists())
