"""Evidence for the auditor, made by hand: one log, one group, one partition with ten messages, one owner.

Its log is built with `wire` alone. Every record is appended one ms after it was sent, all by client 0.
"""

from __future__ import annotations

from marshal_sim.judge.auditor import judge
from marshal_sim.judge.evidence import Delivery, Evidence, Violation
from tests.support import wire

INTERVAL = 2_000
GROUP = "billing"
JOIN, HEARTBEAT, LEAVE, EVICT, CLAIM, RELEASE, GRANT, PAUSE, MOVE, TOPOLOGY = range(1, 11)
NOTE = 13
ONE, TWO = b"1" * 16, b"2" * 16


class EvidenceBuilder:
    """Evidence made by hand: a log whose every record is appended one ms after it was sent."""

    def __init__(self, mode: int = 1, topic_id: str = "") -> None:
        self.evidence = Evidence()
        self.mode = mode
        self.put(0, wire.genesis())
        self.say(1, TOPOLOGY, "t", 1, -1, *((-1, "", topic_id) if topic_id else ()))
        self.evidence.topics["t", 0] = list(range(10))
        self.one = self.join(2, ONE)
        self.epoch = self.say(3, CLAIM, self.one, "t", 0, -1, 0)

    def put(self, ms: int, value: bytes) -> int:
        self.evidence.sent.setdefault(value, (ms - 1, ms - 1, 0))
        self.evidence.log.append(value)
        self.evidence.appended_ms.append(ms)
        return len(self.evidence.log) - 1

    def say(self, ms: int, number: int, *fields: object) -> int:
        return self.put(ms, wire.record(GROUP, number, *fields))

    def join(self, ms: int, instance: bytes) -> int:
        return self.say(ms, JOIN, "c", instance, self.mode, INTERVAL, ["t"])

    def deliver(
        self,
        offset: int,
        ms: float,
        end_ms: float,
        epoch: int = -1,
        instance: bytes = ONE,
        client: int = 0,
        gate_ms: int = -1,
        read_to: int = -1,
    ) -> None:
        log = len(self.evidence.log)
        self.evidence.deliveries.append(
            Delivery(
                GROUP,
                client,
                instance,
                self.epoch if epoch < 0 else epoch,
                "t",
                0,
                offset,
                log if read_to < 0 else read_to,
                ms if gate_ms < 0 else gate_ms,
                ms,
                end_ms,
            )
        )

    def takeover(self, ms: int) -> int:
        """The first session, silent since 3, is evicted at `ms`; a second one claims."""
        two = self.join(ms - 1, TWO)
        extended = max(i for i, v in enumerate(self.evidence.log) if v in self.beats()) if self.beats() else self.one
        self.say(ms, EVICT, self.one, extended, 2 * INTERVAL)
        return self.say(ms + 1, CLAIM, two, "t", 0, self.epoch)

    def beats(self) -> list[bytes]:
        return [v for v in self.evidence.log if len(v) > 20 and v[12 + v[11] + 1] == HEARTBEAT]

    def judged(self) -> list[Violation]:
        return judge(self.evidence).violations

    def found(self) -> set[str]:
        return {violation.invariant for violation in self.judged()}
