"""A simulated witness: the process that publishes the last will of a client that has died (PROTOCOL.md T19).

Its records go through the same network as everybody's. They are independent of records of the dead that are still on
their way. fault_injector.py decides when it notices something, and how often it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.wire import codec, records
from marshal_py.protocol.wire.records import LastWill, Sign
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.faults import NetworkFaults, spread
from marshal_sim.cluster.process import Process

KEPT_PER_INTERVAL: Final = 40  # how often a client keeps its will: every 50 ms at the default interval of 2 s
CLOSED: Final = 0.2  # the share of the faults that close a connection and do no harm
STOPPED: Final = 0.4  # up to this share the client is stopped; the rest kill it


class Witness(Process):
    """Simulates the witness of one client. The judges count what it sends as sent by that client."""

    def __init__(self, client: Client) -> None:
        super().__init__(client.environment, client.number, client.name, client.group, client.clock)
        self.client = client

    def will(self) -> LastWill | None:
        """Returns what the client has kept last."""
        return self.client.kept

    def notice(self, sign: Sign) -> None:
        """Publishes the will if this sign proves that the client has died."""
        will, genesis = self.will(), self.client.world.genesis
        if records.proves_death(sign) and will is not None and genesis is not None:
            self.log = self.client.log
            for record in records.records_of(will, "signal 9"):
                self.post(codec.encode(record, self.group, genesis.incarnation, will.version))

    def read(self, verdict: Verdict, now: Any) -> None:
        raise AssertionError("a witness reads no log")

    def act(self, _: None) -> None:
        raise AssertionError("a witness has no deadlines")

    def end_with(self, error: Exception) -> None:
        raise AssertionError("a witness reads no log")


class Witnesses(dict[Client, Witness]):
    """The witness of each client. It is made when it first has something to notice."""

    def __missing__(self, client: Client) -> Witness:
        self[client] = witness = Witness(client)
        return witness

    def strike(self, client: Client, rng: Random, network: NetworkFaults, duration_ms: Callable[[int], int]) -> bool:
        """Lets the witness of a client notice something. Returns True if the caller must kill the client now.

        `duration_ms(n)` draws a time of at most n intervals.
        """
        way = rng.random()
        if way < CLOSED:
            self[client].notice(Sign.CONNECTION_CLOSED)
        elif way < STOPPED:
            client.freeze(duration_ms(4))
            self[client].notice(Sign.STOPPED)
        while way >= STOPPED:  # a witness that was restarted does not know what the one before has published
            late_ms = spread(rng, 1, network.late_ms_max) if rng.random() < 0.5 else 0
            client.environment.schedule(late_ms, None, self[client].notice, Sign.ENDED)
            if rng.random() < 0.7:
                return True
        return False
