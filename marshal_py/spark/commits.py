"""The news that Spark has committed a batch, from the driver to the process of the query's source.

Spark itself tells a source in Python with the next trigger. A listener in the driver hears of the commit at once, and
`tell` sends it to the socket at which the source's process listens: one datagram, the digest of the batch's end offset.
The socket lies in a folder that no other user can enter, so the file system says who may send; and a digest counts for
nothing but a batch that the process itself has handed over. Where the listener is on another machine, nobody is told
and nothing is lost but time.
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

from marshal_py.client.microbatches import digest_of
from marshal_py.errors import MarshalError

log = logging.getLogger("marshal_py.spark")

DIGEST_BYTES: Final = 64


class CommitSocket:
    """Where the source's process listens. `on_commit` is called with each digest, in a thread of this socket.

    Raises OSError, AttributeError where there are no such sockets, or no place for one.
    """

    def __init__(self, on_commit: Callable[[str], None]) -> None:
        self._on_commit = on_commit
        self._folder = tempfile.mkdtemp(prefix="marshal_")  # for this user alone
        self.address = os.path.join(self._folder, "commits")
        self._closing = False
        self._socket = self._waker = None
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self.address)
            self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._waker.connect(self.address)  # reaches it also when somebody has cleared the folder
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
            except MarshalError as error:  # the query's own calls meet it too
                log.info("a commit was heard of in vain: %s", error)

    def close(self) -> None:
        """Returns when no call of `on_commit` runs any more."""
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


def tell(address: str, end: str) -> bool:
    """Spark has committed the batch with this end offset, as JSON. False if nobody could be told."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)  # a process that does not read is told nothing more
            sending.sendto(digest_of(json.loads(end)).encode(), address)
    except (AttributeError, OSError, ValueError):
        return False
    return True
