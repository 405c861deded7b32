"""A directory as a tar, read back with the standard library's."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.server.archive import Archive

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)


@given(st.dictionaries(names.filter(lambda n: n not in (".", "..")), st.binary(max_size=1500), max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_there_is_in_it(tmp_path: Path, files: dict[str, bytes]) -> None:
    place = tmp_path / "d"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, content in files.items():
        (place / name).write_bytes(content)
    archive = Archive(place)
    raw = b"".join(archive)
    assert len(raw) == archive.length
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        found = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    assert found == files


def test_only_regular_files_and_no_matter_what_is_deleted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "kept").write_bytes(b"x" * 3_000_000)
    (tmp_path / "d" / "link").symlink_to("/etc/passwd")
    chunks = iter(archive := Archive(tmp_path / "d"))
    first = next(chunks)
    shutil.rmtree(tmp_path / "d")
    raw = first + b"".join(chunks)
    assert len(raw) == archive.length
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        assert tar.getnames() == ["kept"]
