"""What a simulated consumer process needs of the cluster around it, beyond what every process needs (process.py)."""

from __future__ import annotations

from typing import Any, Protocol

from marshal_py.errors import MarshalError
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_sim.cluster.process import Environment, Process
from marshal_sim.judge.evidence import Delivery, Evidence


class ClientEnvironment(Environment, Protocol):
    """Declares it. `client` is a Client of client.py, which notes there what can be seen of it from outside."""

    evidence: Evidence
    healed: bool
    keeps_snapshots: bool
    renews_topics: bool
    start_latest: bool
    answers: bool
    calls: bool
    cancels: bool
    locks: bool
    stopped_threads: int
    lanes: bool
    aio: bool

    def go_on_for(self, stopped_ms: int, who: Process) -> None: ...
    def handler_ms(self, place: TopicPartition) -> int: ...
    def delivered(self, delivery: Delivery) -> None: ...
    def client_ended(self, client: Any, reason: MarshalError | None) -> None: ...
    def advised(self, kind: str) -> None: ...
    def handing_over(self, client: Any, epoch: int) -> None: ...
    def fenced(self, client: Any) -> None: ...
    def restarted(self, client: Any, read_to: int) -> None: ...
    def kept(self, client: Any) -> None: ...
    def revive(self, query: Any) -> None: ...
