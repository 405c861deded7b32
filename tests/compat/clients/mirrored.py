"""What wandb and trackio have kept of the runs that were sent to them, as JSON: read with their own code.

`mirrored.py DIRECTORY KIND…`, where wandb has its files.

An offline file of wandb is a log of its protobuf records, in blocks as LevelDB's.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import trackio
from trackio.sqlite_storage import SQLiteStorage
from wandb.proto import wandb_internal_pb2

BLOCK, FIRST_HEADER = 32768, 7


def records(path: Path) -> Iterator[bytes]:
    data, at, parts = path.read_bytes(), FIRST_HEADER, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def of_wandb(directory: Path) -> list[dict]:
    found = []
    for path in sorted(directory.rglob("*.wandb")):
        run: dict = {"rows": []}
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                config = {one.key: json.loads(one.value_json) for one in record.run.config.update}
                run |= {"name": record.run.display_name, "id": record.run.run_id, "config": config}
            elif record.WhichOneof("record_type") == "history":
                row = {
                    (i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item
                }
                run["rows"].append({k: v for k, v in row.items() if not k.startswith("_")})
        found.append(run)
    return found


def of_trackio() -> list[dict]:
    return [
        {"name": run.name, "config": run.config, "rows": SQLiteStorage.get_logs("tinkex", run.name)}
        for run in trackio.Api().runs("tinkex")
    ]


kept = {"wandb": lambda: of_wandb(Path(sys.argv[1])), "trackio": of_trackio}
print(json.dumps({kind: kept[kind]() for kind in sys.argv[2:]}, default=str))
