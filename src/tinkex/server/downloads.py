"""Downloads by signed link; a directory is sent as a tar.

Only signed paths below the home directory can be read. This module knows no checkpoints.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import Endpoint, Gateway
from tinkex.server.signing import DOWNLOADS, DownloadSigner, link_text
from tinkex.service.archive import Archive
from tinkex.service.refusal import Refusal
from tinkex.store import DamagedError, verify

_NO_LINK = "this link is wrong or has expired: ask for a new one"


def download_routes(gateway: Gateway, home: Path, signer: DownloadSigner) -> list[Route]:
    async def download(http: IncomingRequest) -> Response:
        path, query = http.path_params["path"], http.query
        key_id, expires, signature = (query.get(name, "") for name in ("key", "expires", "signature"))
        if not signer.verify(link_text(path, key_id), expires, signature, time.time()):
            raise Refusal(403, _NO_LINK)
        if key_id and not gateway.authenticator.is_valid(key_id):
            raise Refusal(403, "the key that this link was made for was revoked")
        place = _below(home, path)
        try:
            if place.is_dir():
                return await asyncio.to_thread(tar_response, place, http.scope["method"] == "HEAD")
            await asyncio.to_thread(verify, place.parent, [place.name])
        except DamagedError as error:
            raise Refusal(422, str(error)) from None
        if not place.is_file():
            raise Refusal(404, "this file was deleted, or has expired")
        return FileResponse(place, media_type="application/octet-stream", filename=place.name)

    return [Route(f"{DOWNLOADS}/{{path:path}}", Endpoint(gateway, "download", download), methods=["GET"])]


def tar_response(directory: Path, only_head: bool = False) -> Response:
    """A directory's files as one tar; blocks while their checksums are read."""
    archive = Archive(directory)
    headers = {
        "content-length": str(archive.length),
        "content-disposition": f"attachment; filename*=utf-8''{quote(directory.name)}.tar",
    }
    if only_head:
        archive.close()
        return Response(media_type="application/x-tar", headers=headers)
    return StreamingResponse(archive, media_type="application/x-tar", headers=headers)


def _below(home: Path, path: str) -> Path:
    """The place of a signed path. Paths out of the home are never signed; this is a second check."""
    parts = PurePosixPath(path).parts
    place = home.joinpath(*parts)
    if not parts or ".." in parts or parts[0] == "/" or not place.resolve().is_relative_to(home.resolve()):
        raise Refusal(403, _NO_LINK)
    return place
