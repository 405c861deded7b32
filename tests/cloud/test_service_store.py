"""A service whose saved adapters are in a store: on disk elsewhere, or in a real S3 server."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
import time
import urllib.request

import obstore
import obstore.store
import pytest
from safetensors.numpy import load_file

from tests.cloud.servers import BUCKET
from tests.service.harness import Failed, User, found, name_of, serving
from tinkex import store
from tinkex.types import checkpoints as types
from tinkex.wire import ops

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else request.getfixturevalue("s3")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return answer.read()


async def test_saves_are_in_the_store_and_come_back_from_it(tmp_path, root):
    home = tmp_path / "home"
    async with serving(home, store=root) as service:
        ann = User(service)
        session = await ann.session()
        run = await ann.run(session)
        await ann.train(run, 1, 2)
        before = await ann.loss(run, 5)
        path = await ann.save(run, 6, "one")
        sampler = await ann.unnamed_sampler(run, 7, 0)
        told = await ann.result(await ann.sample(sampler))
        await ann.train(run, 8, 2)
        assert await ann.loss(run, 12) != before
        await ann.load(run, 13, path, optimizer=True)
        assert await ann.loss(run, 14) == before
        assert found(home, "weights") == []
    saved = [name for name in store.files(root) if "/weights/one~" in name]
    assert any(name.endswith("/SHA256SUMS") for name in saved)
    shutil.rmtree(home / "runs")  # the server's own disk is lost, but for its ledger
    async with serving(home, store=root) as service:
        ann = User(service)
        again = await ann.result(await ann.sample(sampler))
        assert again.sequences[0].tokens == told.sequences[0].tokens
        other = await ann.run()
        await ann.load(other, 1, path, optimizer=True)
        assert await ann.loss(other, 2) == before
        assert found(home, "staged/*") == []


async def test_a_save_that_is_replaced_or_deleted_leaves_nothing_in_the_store(tmp_path, root):
    async with serving(tmp_path / "home", store=root) as service:
        ann = User(service)
        run = await ann.run()
        path = await ann.save(run, 1, "one")
        first = set(store.files(root))
        await ann.train(run, 2, 1)
        assert await ann.save(run, 4, "one", overwrite=True) == path
        second = set(store.files(root))
        assert not first & second
        assert len(first) == len(second)
        copied = await ann.call(
            ops.COPY_WEIGHTS, types.CopyWeightsRequest(source_path=path, destination_project_id="p")
        )
        for saved in (path, copied.tinker_path):
            await ann.call(ops.DELETE_CHECKPOINT, types.CheckpointRequest(**name_of(saved)))
        assert store.files(root) == {}


async def test_archives_and_exports_are_presigned_links(tmp_path, s3):
    async with serving(tmp_path / "home", store=s3) as service:
        ann = User(service)
        run = await ann.run()
        path = await ann.save_for_sampler(run, 1, "one")
        answer = await ann.call(ops.GET_CHECKPOINT_ARCHIVE_URL, types.CheckpointRequest(**name_of(path)))
        assert "Signature=" in answer.url
        assert answer.expires.timestamp() == pytest.approx(time.time() + 3600, abs=60)
        with tarfile.open(fileobj=io.BytesIO(fetch(answer.url))) as packed:
            packed.extractall(tmp_path / "out", filter="data")
        store.verify(tmp_path / "out")
        assert load_file(tmp_path / "out" / "adapter_model.safetensors")
        request = types.SaveWeightsExternalRequest(model_id=run, seq_id=2, path="e")
        exported = (await ann.result(await ann.call(ops.SAVE_WEIGHTS_EXTERNAL, request))).path
        urls = await ann.call(ops.GET_EXTERNAL_WEIGHTS_URLS, types.CheckpointRequest(**name_of(exported)))
        assert b'"peft_type"' in fetch(urls.urls["adapter_config.json"])
        await ann.call(ops.DELETE_CHECKPOINT, types.CheckpointRequest(**name_of(path)))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(answer.url)


async def test_a_damaged_object_is_not_loaded(tmp_path, s3):
    async with serving(tmp_path / "home", store=s3) as service:
        ann = User(service)
        run = await ann.run()
        path = await ann.save(run, 1, "one")
        weights = next(name for name in store.files(s3) if name.endswith("adapter_model.safetensors"))
        key = f"{s3}/{weights}".removeprefix(f"s3://{BUCKET}/")
        bucket = obstore.store.from_url(f"s3://{BUCKET}")
        damaged = bytearray(bytes(obstore.get(bucket, key).bytes()))
        damaged[-1] ^= 1
        obstore.put(bucket, key, bytes(damaged))
        with pytest.raises(Failed, match="is damaged"):
            await ann.load(run, 2, path)
        assert await ann.loss(run, 3) > 0  # the run goes on


async def test_quotas_count_what_is_in_the_store(tmp_path, s3):
    async with serving(tmp_path / "home", store=s3, disk_per_user=60_000) as service:
        ann = User(service)
        run, seq = await ann.run(), 1
        while (stored := service.files.in_store and service.ledger.checkpoint_bytes("ann")) < 20_000:
            await ann.save(run, seq, f"n{seq}")
            seq += 1
        assert stored == sum(store.files(s3).values())
        with pytest.raises(Failed, match="bytes allowed"):
            await asyncio.gather(*(ann.save(run, seq + n, f"more{n}") for n in range(30)))
