"""Reports from the driver to the query's source process that Spark has committed a batch.

Spark itself tells a source in Python only at the next trigger. A listener in the driver knows at once, and `report`
sends one datagram to the socket of the source's process: the digest of the batch's end offset. The socket is in a
folder that no other user can enter, so the file system says who may send; and a digest has an effect only if the
process itself has handed over the batch. If the listener runs on another machine the report fails, which costs time
and nothing else: the commit is known at the next trigger.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Final

from marshal_py.errors import MarshalError
from marshal_py.spark.stream.micro_batches import digest_of

logger: Final = logging.getLogger("marshal_py.spark")

DIGEST_BYTES: Final = 64


class CommitSocket:
    """Listens in the source's process: a thread calls `on_commit` with each digest. Raises AttributeError without Unix
    sockets, OSError if none can be made."""

    def __init__(self, on_commit: Callable[[str], None]) -> None:
        self._on_commit = on_commit
        self._folder = tempfile.mkdtemp(prefix="marshal_")  # for this user alone
        self.address: str = os.path.join(self._folder, "commits")
        self._closing = False
        self._socket = self._waker = None
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self.address)
            self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._waker.connect(self.address)  # keeps working if the folder is deleted
        except BaseException:
            self._clear()
            raise
        self._thread = threading.Thread(target=self._run, args=(self._socket,), name="marshal-commits", daemon=True)
        self._thread.start()

    def _run(self, listening: socket.socket) -> None:
        while True:
            digest = listening.recv(DIGEST_BYTES)
            if self._closing:
                return
            try:
                self._on_commit(digest.decode("ascii", "replace"))
            except MarshalError as error:  # the query's own calls raise it too
                logger.info("a reported commit was not acked: %s", error)

    def close(self) -> None:
        """Closes the socket. Returns once no call of `on_commit` is running."""
        self._closing = True
        assert self._waker is not None
        self._waker.send(b"")
        self._thread.join()
        self._clear()

    def _clear(self) -> None:
        for opened in (self._socket, self._waker):
            if opened is not None:
                opened.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def report(address: str, end: str) -> bool:
    """Reports the committed batch with this end offset (JSON). False if that could not be sent."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)  # if the process does not read, the report is dropped
            sending.sendto(digest_of(json.loads(end)).encode(), address)
    except (AttributeError, OSError, ValueError):
        return False
    return True
