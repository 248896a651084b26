"""A weight update as a session: pause, begin, buckets, end, flush, go on."""

from __future__ import annotations

from contextlib import suppress

from forerun.errors import ForerunError
from forerun.models.weight_stream import WeightStream
from forerun.rollout.client import Client, Refused
from forerun.rollout.served import buckets
from forerun.rollout.sglang.transport import Transport

_NO_SUCH_CALL = 404
# Which workers a call is for: the target and, where there is one, the draft worker.
_BOTH = {"selector": "all"}


class BrokeOff(ForerunError):
    """An update failed when some of it may have been loaded: the server holds a mixture."""


def send_update(
    client: Client,
    transport: Transport,
    weights: WeightStream,
    version: int,
    *,
    drafts: bool,
    bucket_bytes: int,
) -> None:
    """Load all tensors into target and draft worker, flush the caches that the old ones filled, and set the version.

    The server is paused meanwhile. If it fails midway it stays paused, so that nobody samples from a mixture; the next
    whole update lets it go on.

    Args:
        client: the server.
        transport: how a bucket travels.
        weights: under the names of the server's checkpoint. One bucket of them is held at a time.
        version: becomes the server's weight_version with the last bucket.
        drafts: whether the server drafts.
        bucket_bytes: most bytes of a bucket.

    Raises:
        BrokeOff: the server refused a bucket or what follows, or is gone; or a weight could not be made.
        ForerunError: the same, before the first bucket.
    """
    try:
        _pause(client)
        session = _begin(client)
        if drafts and not session and not transport.reaches_drafter_always:
            raise ForerunError(
                "this version of SGLang leaves the draft worker's weights as they are when weights are broadcast: "
                "set rollout.weight_transport=request, or use a version that has /begin_weight_update"
            )
    except ForerunError:
        with suppress(ForerunError):  # also where only the answer to the pause was lost
            _go_on(client)
        raise
    try:
        last = sum(1 for _ in buckets(weights.described, bucket_bytes)) - 1
        for i, bucket in enumerate(buckets(weights, bucket_bytes)):
            ending = {"flush_cache": True, "weight_version": str(version)}
            settings = {"load_format": None, **(ending if i == last else {"flush_cache": False})}
            transport.send(bucket, settings | (_BOTH if session else {}))
        if session:
            client.post("/end_weight_update")
        _go_on(client)
    except ForerunError as error:
        if session:  # one that stays open would make the next fail to begin
            with suppress(ForerunError):
                client.post("/end_weight_update")
        raise BrokeOff(str(error)) from None


def _pause(client: Client) -> None:
    """Running requests of other clients wait, and are computed anew under the new weights."""
    try:
        client.post("/pause_generation", {"mode": "retract"})
    except Refused as error:
        if error.status != _NO_SUCH_CALL:
            raise


def _go_on(client: Client) -> None:
    try:
        client.post("/continue_generation", {})
    except Refused as error:
        if error.status != _NO_SUCH_CALL:
            raise


def _begin(client: Client) -> bool:
    """Open a session for both workers; False where the version has none, and loads at once."""
    try:
        client.post("/begin_weight_update", _BOTH)
    except Refused as error:
        if error.status == _NO_SUCH_CALL:
            return False
        client.post("/end_weight_update")  # one that broke off may have left it open
        client.post("/begin_weight_update", _BOTH)
    return True
