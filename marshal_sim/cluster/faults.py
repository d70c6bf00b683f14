"""The kinds of faults, and the faults of the network, drawn from the seed.

Each seed switches a random subset of the kinds on (swarm testing), so that rare combinations occur and frequent faults
do not hide rare ones. Nothing here touches a client; fault_injector.py and cluster.py carry out what is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

# Kinds that change every message, by probability.
NETWORK_KINDS: Final = ("delay", "reorder", "duplicate", "drop", "retry", "partial_read")
# Kinds that affect the fetches of messages.
FETCH_KINDS: Final = ("late_refusal",)
# Kinds that stop one process between or inside its steps.
STALL_KINDS: Final = ("step_stop", "gate_stop")
# Kinds that happen at one time.
STRIKE_KINDS: Final = (
    "stop",
    "crash",
    "twin",
    "suspend",
    "wall_jump",
    "lag",
    "outage",
    "outage_writes",
    "outage_reads",
    "grow",
    "admin",
    "two_admins",
    "slow_handler",
    "leave",
    "arrive",
    "step_down",
    "poison",
    "stuck_handler",
    "broker_clock",
    "onlooker",
    "mode_change",
    "grow_logs",
    "false_reclaim",
    "shrink",
    "recreate",
    "beyond",
    "fetch_error",
)
# Kinds that are a property of the whole run, or happen after the heal: `stuck_reader` and `slow_uplink` never end;
# `divergence` falsifies one client's memory; `drain` is a pause by an admin while a handler hangs, `busy_join` is
# a client that joins while a handler hangs.
RUN_KINDS: Final = (
    "clock_rate",
    "fast_reclaim",
    "logs",
    "genesis_race",
    "mixed_modes",
    "stuck_reader",
    "slow_uplink",
    "snapshots",
    "divergence",
    "drain",
    "busy_join",
)
# Kinds of a group's life. `deletion`: an admin deletes a group with its live consumers, and another one revives it.
# `create_race`, a property of the whole run: an admin creates each group, and a consumer brings other settings, while
# the first consumers join. `keys`: admins give the groups keys, exchange them, and sign what they write; others write
# what nobody has signed, or sign it with a key of their own, or copy it (F11).
LIFE_KINDS: Final = ("deletion", "keys")
LIFE_RUN_KINDS: Final = ("create_race",)
# Kinds that happen to topics that are consumed. `retention`: Kafka deletes the beginning of a partition, read or not.
# `recreate_topic`: a topic is deleted and, at once or later, created again, maybe with more or fewer partitions, while
# brokers lag behind. `lost_tail`: a partition loses its newest messages in an unclean leader election, and others may
# get their offsets. `leader_move`: a partition has no leader for a while, then a new one with all messages, which may
# not know at once how many of them it may give out.
DATA_KINDS: Final = ("retention", "recreate_topic", "lost_tail", "leader_move")
# Kinds that a caller may ask for; some seeds have those of DRAWN_RUN_KINDS without. `witness`: clients keep
# wills; some die, and a witness publishes the will after any delay, in part or twice; others live although their
# witness has lost sight of them (T19). `answers`, a property of the whole run: handlers give messages back and end
# them, and there is a dead-letter topic (D14, D15). `calls`, one too: users also flush, seek, pause partitions,
# stop, drain and close, from other threads and amid a stop or drain, and cancel calls that wait; and a thread may be
# stopped while the rest of its process goes on. `cancels`, one too: a call may be cancelled at each of its waits, and
# the user makes it again at once. `behind`, one too: consumers release partitions on which they fall behind (D16).
# `lanes`, one too: half of the consumers handle messages by `process`. `locks`, one too: a thread may be stopped where
# it leaves a lock (locks.py). `aio`, one too, with `calls`: most consumers are AsyncConsumers (aio_user.py), whose
# tasks are cancelled at any of their waits, and whose event loop is blocked at times.
ASKED_KINDS: Final = ("witness",)
ASKED_RUN_KINDS: Final = ("aio", "answers", "behind", "calls", "cancels", "lanes", "locks")
# One seed of so many has it.
DRAWN_RUN_KINDS: Final = {
    "calls": 4,
    "cancels": 16,
    "answers": 5,
    "lanes": 7,
    "locks": 11,
    "aio": 13,
    "keys": 6,
    "retention": 9,
    "recreate_topic": 12,
    "lost_tail": 11,
    "leader_move": 19,
}
# Kinds that end shortly before the healing, or take long: none begins late in a run.
LONG_KINDS: Final = frozenset(
    {
        "admin",
        "two_admins",
        "stuck_handler",
        "mode_change",
        "onlooker",
        "shrink",
        "recreate",
        "beyond",
        "fetch_error",
        "deletion",
        "recreate_topic",
        "lost_tail",
    }
)
# Kinds after which a log, or one group in it, cannot be read on: one at most in a run, and no progress is asked of it.
DAMAGE_KINDS: Final = ("gap", "compaction", "truncation", "envelope", "newer", "unclean")
TRACED_KINDS: Final = (
    STRIKE_KINDS + DAMAGE_KINDS + ASKED_KINDS + LIFE_KINDS + DATA_KINDS
)  # by the number that a trace has
KINDS: Final = (
    NETWORK_KINDS
    + FETCH_KINDS
    + STALL_KINDS
    + STRIKE_KINDS
    + RUN_KINDS
    + LIFE_KINDS
    + LIFE_RUN_KINDS
    + DATA_KINDS
    + DAMAGE_KINDS
    + ASKED_KINDS
    + ASKED_RUN_KINDS
)

LATE_MS_MAX: Final = 600_000  # delays and late copies up to 10 minutes
STOP_MS_MAX: Final = 1_800_000  # a client is stopped for up to 30 minutes
RATE_PPM_MAX: Final = 200
BROKER_RATE_PPM_MAX: Final = 500
DAMAGE_CHANCE: Final = 0.06  # share of the runs with several faults in which damage is one


def draw_kinds(rng: Random) -> frozenset[str]:
    """Draws the kinds of faults of this seed: none, outages alone, or each kind with the same chance."""
    shape = rng.random()
    if shape < 0.06:
        return frozenset()
    if shape < 0.14:  # outages alone: no client may lose a claim (V6)
        return frozenset(kind for kind in ("outage", "outage_writes", "clock_rate") if rng.random() < 0.7)
    chance = (0.15, 0.3, 0.6)[int(rng.random() * 3)]
    usual = NETWORK_KINDS + FETCH_KINDS + STALL_KINDS + STRIKE_KINDS + RUN_KINDS
    kinds = {kind for kind in usual if rng.random() < chance}
    if rng.random() < DAMAGE_CHANCE:
        kinds.add(DAMAGE_KINDS[int(rng.random() * len(DAMAGE_KINDS))])
    # Of each group's life, by the number that is drawn already: the runs without these kinds stay what they are.
    kinds |= {"create_race"} if shape >= 0.88 else set()
    kinds |= {"deletion"} if 0.82 <= shape < 0.94 else set()
    kinds |= {kind for kind, every in DRAWN_RUN_KINDS.items() if int(shape * 10_000) % every == 0}
    return frozenset(kinds)


def spread(rng: Random, least: int, most: int) -> int:
    """Draws a number between two bounds, with the same chance for each doubling between them."""
    if most <= least:
        return least
    doublings = (most // max(1, least)).bit_length()
    low = max(1, least) << int(rng.random() * doublings)
    return min(most, low + int(rng.random() * low))


class NetworkFaults:
    """Draws delays and losses on the way to the broker and back, and stops between two steps of a process."""

    def __init__(self, rng: Random, kinds: frozenset[str], interval_ms: int) -> None:
        self._rng = rng
        self.late_ms_max: int = min(LATE_MS_MAX, 12 * interval_ms)
        self.stop_ms_max: int = min(STOP_MS_MAX, 8 * interval_ms)
        self.delay: float = self._chance(rng, kinds, "delay", 0.3)
        self.reorder: float = self._chance(rng, kinds, "reorder", 0.3)
        self.duplicate: float = self._chance(rng, kinds, "duplicate", 0.3)
        self.drop: float = self._chance(rng, kinds, "drop", 0.2)
        self.retry: float = self._chance(rng, kinds, "retry", 0.2)
        self.partial: float = 0.5 if "partial_read" in kinds else 0.0
        self.stop_step: float = self._chance(rng, kinds, "step_stop", 0.02)
        self.stop_gate: float = self._chance(rng, kinds, "gate_stop", 0.05)
        self.late_refusal: float = self._chance(rng, kinds, "late_refusal", 0.2)
        self.stop_thread: float = self._chance(rng, kinds, "calls", 0.1)
        self.cancel: float = self._chance(rng, kinds, "cancels", 0.3)
        self.stop_at_lock: float = self._chance(rng, kinds, "locks", 0.1)
        self.cancel_task: float = self._chance(rng, kinds, "aio", 0.05)
        self.thread_ms_max: int = interval_ms
        self.refusal_ms_max: int = 4 * interval_ms
        self.latency_ms = (1, 2, 5, 20)[int(rng.random() * 4)]
        self.stormy: bool = bool(self.delay or self.reorder or self.duplicate or self.drop or self.retry)
        self.faults: int = 0
        self.in_flight: list[Callable[[], None]] = []  # each lands a record that is still on its way
        self.survival: float = 0.5  # share of records that survive a broker outage; drawn for each

    @staticmethod
    def _chance(rng: Random, kinds: frozenset[str], kind: str, most: float) -> float:
        return most * rng.random() if kind in kinds else 0.0

    def heal(self) -> None:
        self.delay = self.reorder = self.duplicate = self.drop = self.retry = self.partial = 0.0
        self.stop_step = self.stop_gate = self.late_refusal = self.stop_thread = self.cancel = 0.0
        self.stop_at_lock = self.cancel_task = 0.0
        self.stormy = False
        for land in self.in_flight:  # what the network still holds arrives now: late records are faults too
            land()
        self.in_flight.clear()

    def read_ms(self) -> int:
        """Draws how many ms a fetch takes."""
        return 1 + int(self._rng.random() * self.latency_ms)

    def refusal_ms(self) -> int:
        """Draws after how many ms a client reports that a fetch was refused. It is mostly 0: the fetch is not refused
        late.
        """
        if not self.late_refusal or self._rng.random() >= self.late_refusal:
            return 0
        self.faults += 1
        return spread(self._rng, 1, self.refusal_ms_max)

    def question_ms(self) -> int:
        """Draws how many ms it takes to look up where a partition begins and ends."""
        return spread(self._rng, 1, self.refusal_ms_max) if self.late_refusal else self.read_ms()

    def write_ms(self) -> list[tuple[int, bool]]:
        """Draws what becomes of a record that is sent. Returns one entry for each copy of it that reaches the log.

        An entry is the copy's delay in ms, and whether it keeps its place among the producer's other records.
        """
        usual_ms = 1 + int(self._rng.random() * self.latency_ms)
        if not self.stormy:
            return [(usual_ms, True)]
        if self._rng.random() < self.drop:
            self.faults += 1
            return []
        late = self._rng.random() < self.delay
        if late:
            usual_ms = spread(self._rng, 1, self.late_ms_max)
        in_order = self._rng.random() >= self.reorder
        copies = [(usual_ms, in_order)]
        if self._rng.random() < self.retry:  # an error was reported, the record was written, the producer tries again
            copies.append((usual_ms + spread(self._rng, 1, self.late_ms_max // 10), True))
        while len(copies) < 4 and self._rng.random() < self.duplicate:
            copies.append((spread(self._rng, 1, self.late_ms_max), False))
        self.faults += late + (not in_order) + len(copies) - 1
        return copies

    def survives_outage(self) -> bool:
        """Draws whether a record sent in a broker outage is written after it. Otherwise it is given up."""
        return self._rng.random() < self.survival

    def cut(self, at: int, end: int) -> int:
        """Draws the offset up to which one fetch brings records, between `at` and `end`."""
        if self.partial and end > at and self._rng.random() < self.partial:
            return at + int(self._rng.random() * (end - at + 1))
        return end

    def _stop_ms(self, chance: float, most_ms: int) -> int:
        if not chance or self._rng.random() >= chance:
            return 0
        self.faults += 1
        return spread(self._rng, 1, most_ms)

    def stall_ms(self) -> int:
        """Draws how many ms a process stops between two of its steps. It is mostly 0."""
        return self._stop_ms(self.stop_step, self.stop_ms_max)

    def thread_ms(self) -> int:
        """Draws how many ms a thread of the user stops between two of its steps. It is mostly 0."""
        return self._stop_ms(self.stop_thread, self.thread_ms_max)

    def cancels(self, call: str) -> bool:
        """Draws whether a call of the user is cancelled where it waits. `call`: which one."""
        if not self.cancel or self._rng.random() >= self.cancel:
            return False
        self.faults += 1
        return True

    def cancels_task(self) -> bool:
        """Draws whether a task is cancelled while its event loop runs what is ready."""
        if not self.cancel_task or self._rng.random() >= self.cancel_task:
            return False
        self.faults += 1
        return True

    def lock_ms(self) -> int:
        """Draws how many ms a thread of the user stops where it has left a lock. It is mostly 0."""
        return self._stop_ms(self.stop_at_lock, self.thread_ms_max)

    def gate_ms(self) -> int:
        """Draws how many ms a process stops between `Member.may_deliver` and the call of the handler. It is mostly 0
        (X3).
        """
        return self._stop_ms(self.stop_gate, self.stop_ms_max)
