"""Keeps the last wills of a Marshal's consumers for a witness, which ends their sessions if this process dies (T19).

A thread of its own does it, so that neither heartbeats nor messages wait for a witness: every KEEP_S it notes under the
lock how far each consumer is, and writes what has changed without the lock. If the witness is gone, it starts another
one after a pause that grows, and each consumer gets the event `last_will_lost`. So it does if a `marshal run` is around
this process and cannot be reached.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from math import inf
from typing import Any, Final

from marshal_py.client.connection import Context
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.loop import Loop
from marshal_py.errors import InvalidOption, UnsupportedPlatform
from marshal_py.last_will import connecting, death
from marshal_py.last_will.connecting import WitnessConnection, start_witness
from marshal_py.last_will.kept_file import KeptFile
from marshal_py.last_will.messages import Register
from marshal_py.protocol.wire.records import TRY_INTERVALS, LastWill
from marshal_py.transport import settings

CHOICES: Final = ("auto", "process", "off")
KEEP_S: Final = 0.05  # what was acked in this time before a death may be delivered again
SHARE: Final = 20  # keeping takes at most this part of one core: a thousand busy partitions are kept less often
READY_S: Final = 5.0  # how long a consumer's start waits for the witness; its Join names one that is late by its kind
PAUSE_S_MIN: Final = 0.5  # before a lost witness is started again
PAUSE_S_MAX: Final = 60.0
LATE: Final = {"run": "marshal run", "process": "process"}  # names of a witness that has not said its own
AGAIN: Final = {
    "run": "marshal run is asked again after a pause",
    "process": "another witness is started after a pause",
}
FOR_GOOD: Final = "this process stays without a witness"
UNKEPT: Final = "its last will cannot be kept ({}); that is tried again"
# Calls into Python, which cannot leave this process. Nothing is lost without them in a producer that logs nowhere.
_CALLS: Final = frozenset({"error_cb", "stats_cb", "throttle_cb", "logger", "on_commit", "log_cb"})


def check(choice: str, given: Mapping[str, Any], *, reachable: bool) -> str:
    """Returns the witness to use: "run" (the `marshal run` around this process), "process" or "". `given`: librdkafka's
    settings. `reachable`: by other processes. Raises InvalidOption, UnsupportedPlatform."""
    if choice not in CHOICES:
        raise InvalidOption("last_will", choice, f"one of {', '.join(CHOICES)}")
    if choice == "off":
        return ""
    if choice == "auto":  # one that cannot be used is an event of each consumer, not an error
        return "run" if reachable and connecting.expected() else ""
    if why := death.unsupported():
        raise UnsupportedPlatform("last_will", f"this system: {why}", 'use last_will="off"')
    if not reachable:
        raise InvalidOption("last_will", choice, "a cluster that other processes can reach, not one in memory")
    if calls := _calls(given):
        raise InvalidOption("last_will", choice, f"settings without Python callbacks: {calls}")
    return "process"


def _calls(given: Mapping[str, Any]) -> str:
    """Returns which of these settings keeps a witness from using them; "" if none does."""
    calls = sorted(key for key, value in given.items() if callable(value) and key not in _CALLS)
    return f"a witness cannot call {calls[0]}" if calls else ""


def of_program(given: Mapping[str, Any]) -> str:
    """Returns the choice of a whole program: "process" where that works; "auto" with a `marshal run`, which exists
    already."""
    if connecting.descriptor() is not None:
        return "auto"
    try:
        return check("process", given, reachable=True)
    except (InvalidOption, UnsupportedPlatform):
        return "auto"


class _Kept:
    """What is kept of one consumer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.file: KeptFile | None = None
        self.registered = False
        self.told = ""  # why there is no witness, as the consumer was told
        self.unkept = ""  # why its will cannot be kept

    def keep(self, will: LastWill | None) -> None:
        """Keeps the will, or notes why that fails: this process has no descriptor left, or the machine no space."""
        try:
            self.file = self.file or KeptFile()
            self.file.keep(will)
        except OSError as error:
            self.unkept = UNKEPT.format(error)
            return
        if self.unkept:
            self.unkept = self.told = ""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class LastWills:
    """Keeps the wills of all consumers of one Marshal."""

    def __init__(self, context: Context, kind: str, given: settings.Settings, incarnation: bytes, loop: Loop) -> None:
        """Starts the thread. `kind`: "run" or "process", as `check` returns it."""
        self._context, self._kind, self._given, self._incarnation = context, kind, given, incarnation
        self._loop = loop
        self._kept: dict[ConsumerDriver, _Kept] = {}
        self._numbers = 0
        self._connection: WitnessConnection | None = None
        self._ready = threading.Event()  # the witness has answered, is late, or there is none for now
        self._closing = False
        self._wake = threading.Event()
        self._registered = threading.Condition()  # told when a session was, or when there is no witness
        self._pause_s = PAUSE_S_MIN
        self._retry_s = 0.0  # of the monotonic clock
        self._lost = ""  # why there is none
        self._thread = threading.Thread(target=self._run, name="marshal-last-will", daemon=True)
        self._thread.start()

    @property
    def witness(self) -> str:
        """Returns the witness's name for a Join, or "". Waits READY_S for one just started; a late one finds the
        session, so it counts."""
        answered = self._ready.wait(READY_S)
        connection = self._connection
        if answered and connection is None:
            return ""
        return (connection.name if connection is not None else "") or LATE[self._kind]

    def wait_registered(self, driver: ConsumerDriver) -> None:
        """Waits until the witness would be told of this consumer's death, or there is none; for READY_S at most."""

        def done() -> bool:
            kept = self._kept.get(driver)
            return (
                self._connection is None or driver.ended or (kept is not None and bool(kept.registered or kept.unkept))
            )

        self._wake.set()
        with self._registered:
            self._registered.wait_for(done, READY_S)

    def close(self, timeout_s: float) -> None:
        """Takes back what is registered, in `timeout_s` seconds at most: consumers that have left need no witness."""
        self._closing = True
        self._wake.set()
        self._thread.join(min(READY_S, timeout_s))

    # --- the thread

    def _run(self) -> None:
        while not self._closing:
            took_s = 0.0
            self._wake.clear()
            try:
                self._connect()
                began_s = time.thread_time()  # of this thread: waiting for the lock or for a core is no work
                self._keep()
                took_s = time.thread_time() - began_s
            except Exception as error:
                self._lose(repr(error))
            if not self._closing:  # without a witness for good, new consumers are told, and that is all
                self._wake.wait(None if self._retry_s == inf else max(KEEP_S, SHARE * took_s))
        if self._connection is not None:
            for kept in self._kept.values():
                self._connection.withdraw(kept.number)
            self._connection.close()
        for kept in self._kept.values():
            kept.close()

    def _connect(self) -> None:
        """Sees to it that there is a connection, if it is time for one."""
        connection = self._connection
        if connection is not None:
            if not connection.lost():
                return
            self._lose("the witness has ended")
            if self._kind == "process":
                return
            # Whether `marshal run` has ended, too, is known at once. The consumers are told that, and no guess.
        elif time.monotonic() < self._retry_s:
            return
        try:
            source = self._source()
            if connection is not None:  # it lives, and had no descriptor left for a session: it is asked after a pause
                source.close()
                return
            self._connection = connection = WitnessConnection(source)
            connection.wait(READY_S)
        except connecting.Unusable as error:
            self._lose(str(error), for_good=True)
            return
        except (OSError, subprocess.SubprocessError) as error:
            self._lose(str(error))
            return
        if connection.lost():
            self._lose("the witness ended at once")
            return
        # One that has not answered is late, and no more than that: it finds what is registered once it runs again.
        self._pause_s, self._lost = PAUSE_S_MIN, ""
        for kept in self._kept.values():
            kept.told = ""
        self._ready.set()

    def _source(self) -> socket.socket:
        """Returns a new connection to a witness. Raises OSError, SubprocessError."""
        if self._kind == "process":
            return start_witness()
        if why := death.unsupported() or _calls(self._given):
            raise connecting.Unusable(why)
        return connecting.connect()

    def _lose(self, why: str, *, for_good: bool = False) -> None:
        """Notes that there is no witness; another is started, or `marshal run` asked, after a pause, unless
        `for_good`."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        for kept in self._kept.values():
            kept.registered = False
        self._retry_s = inf if for_good else time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        self._ready.set()
        with self._registered:
            self._registered.notify_all()
        if for_good or not self._lost:
            self._lost = f"{why}; {FOR_GOOD if for_good else AGAIN[self._kind]}"

    def _tell(self, drivers: list[ConsumerDriver]) -> None:
        """Tells these consumers that they have no witness, and why, unless they know."""
        texts = {driver: self._kept[driver].unkept or self._lost for driver in drivers}
        untold = {driver: text for driver, text in texts.items() if text and self._kept[driver].told != text}
        if not untold:
            return
        with self._context.outbox, self._context.lock:
            for driver, text in untold.items():
                self._kept[driver].told = text
                driver.advise("last_will_lost", text=text)

    def _keep(self) -> None:
        wills: dict[ConsumerDriver, LastWill | None] = {}
        with self._context.lock:
            for driver in self._loop.drivers:
                wills[driver] = driver.member.last_will()
        for driver, will in wills.items():
            kept = self._kept.get(driver)
            if kept is None:
                self._numbers += 1
                kept = self._kept[driver] = _Kept(self._numbers)
            kept.keep(will)
            if self._connection is not None and not kept.registered and kept.file is not None and not kept.unkept:
                self._connection.register(self._session(kept.number, driver), kept.file.fd)
                kept.registered = True
                with self._registered:
                    self._registered.notify_all()
        self._tell([driver for driver, will in wills.items() if will is not None])
        for driver in [driver for driver in self._kept if driver not in wills]:
            kept = self._kept.pop(driver)  # it has left, or ended with an error: then its lease ends as ever
            if self._connection is not None and kept.registered:
                self._connection.withdraw(kept.number)
            kept.close()

    def _session(self, number: int, driver: ConsumerDriver) -> Register:
        given = {key: value for key, value in self._given.items() if key not in _CALLS}
        timeout_ms = TRY_INTERVALS * driver.member.options.interval_ms
        producer = settings.will_writer(given, timeout_ms)
        return Register(number, driver.member.name, self._incarnation, self._context.topic, driver.log, producer)
