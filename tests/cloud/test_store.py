"""Locations: the same promises on disk and in a real S3 server."""

from __future__ import annotations

import hashlib
import threading
import urllib.request

import obstore
import obstore.store
import pytest

from tests.cloud.servers import BUCKET
from tinkex import store
from tinkex.errors import InvalidInputError

pytestmark = pytest.mark.slow


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else request.getfixturevalue("s3")


def write(location: str, content: dict[str, bytes], **options) -> None:
    with store.atomic_directory(location, **options) as part:
        for name, data in content.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(data)


def read(location: str) -> dict[str, bytes]:
    with store.local_copy(location) as place:
        store.verify(place)
        return {name: (place / name).read_bytes() for name in store.files(location) if name != "SHA256SUMS"}


def test_a_directory_comes_back_with_its_checksums_whatever_its_name(root):
    large = bytes(range(256)) * 50_000  # over 5 MiB: in parts
    content = {"a.bin": large, "sub/b.txt": b"b", "empty": b""}
    for name in ("plain", "step 10, é=1+2@x"):
        location = store.join(root, f"runs/s/weights/{name}")
        write(location, content)
        assert read(location) == content
        sums = dict(
            line.split("  ")[::-1] for line in store.read_file(f"{location}/SHA256SUMS").decode().splitlines()
        )
        assert sums == {n: hashlib.sha256(data).hexdigest() for n, data in content.items()}
        assert store.directory_bytes(location) > len(large)


def test_what_exists_is_replaced_only_if_asked_and_a_failure_leaves_nothing(root):
    location = store.join(root, "one")
    write(location, {"a": b"1", "old": b"x"})
    with pytest.raises(store.LocationExistsError, match="already exists"):
        write(location, {"a": b"2"})
    write(location, {"a": b"2"}, overwrite=True)
    assert read(location) == {"a": b"2"}
    with pytest.raises(IsADirectoryError):
        write(store.join(root, "two"), {"a": b"1", "sub/b": b"2", "sub": b"3"})
    assert store.files(store.join(root, "two")) == {}
    store.copy_directory(location, store.join(root, "copied"))
    store.remove(location)
    assert store.files(location) == {}
    assert read(store.join(root, "copied")) == {"a": b"2"}


def test_one_of_many_creates_a_file(root):
    location, won, lost = store.join(root, "log/000001"), [], []

    def create(n: int) -> None:
        try:
            store.create_file(location, b"%d" % n)
            won.append(n)
        except store.LocationExistsError:
            lost.append(n)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    assert store.read_file(location) == b"%d" % won[0]
    with pytest.raises(FileNotFoundError):
        store.read_file(store.join(root, "log/000002"))


def test_a_damaged_object_is_refused_by_name(s3):
    location = store.join(s3, "adapter")
    write(location, {"a.bin": b"right"})
    bucket = obstore.store.from_url(f"s3://{BUCKET}")
    key = f"{location}/".removeprefix(f"s3://{BUCKET}/")
    obstore.put(bucket, f"{key}a.bin", b"wrong")
    with pytest.raises(store.DamagedError, match=r"a\.bin is damaged"), store.local_copy(location):
        pass
    obstore.delete(bucket, f"{key}SHA256SUMS")
    with pytest.raises(FileNotFoundError, match="nothing at"), store.local_copy(location):
        pass


def test_a_signed_link_works_for_anybody_and_only_for_its_file(s3, tmp_path):
    (tmp_path / "x.tar").write_bytes(b"tar")
    store.write_file(tmp_path / "x.tar", store.join(s3, "archives/x.tar"))
    url = store.link(store.join(s3, "archives/x.tar"), 60)
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"tar"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.replace("x.tar", "y.tar"))


def test_wrong_locations_and_a_dead_store_are_told(monkeypatch, s3):
    assert store.read_location("s3://bucket/a/") == "s3://bucket/a"
    assert store.read_location("gs://bucket") == "gs://bucket"
    for wrong in ("s3://", "ftp://x/y", "http://x"):
        with pytest.raises(InvalidInputError, match="write"):
            store.read_location(wrong)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(store.StoreError, match=r"cannot create s3://.*other/x: "):
        store.create_file("s3://other/x", b"1")


def test_a_large_file_is_put_in_parts(s3, tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x" * (11 << 20))
    (tmp_path / "y.bin").write_bytes(b"y")
    store.write_file(tmp_path / "x.bin", store.join(s3, "x.bin"))
    store.upload(tmp_path, store.join(s3, "adapter"))
    bucket, prefix = obstore.store.from_url(f"s3://{BUCKET}"), s3.removeprefix(f"s3://{BUCKET}/")
    names = ("x.bin", "adapter/x.bin", "adapter/y.bin")
    tags = [obstore.head(bucket, f"{prefix}/{name}")["e_tag"] for name in names]
    # S3 names an object of parts after their number.
    assert [tag.strip('"').partition("-")[2] for tag in tags] == ["3", "3", ""]
