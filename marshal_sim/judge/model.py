"""The auditor's own model of one group: live sessions and their extensions, claims, positions, the pause.

It takes from the oracle what a record says and whether it was accepted, and nothing else. It applies the few rules on
which the invariants rest, and names each record that should not have been accepted and each difference from the
oracle's state. So it finds a bug that both folds share.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, Final

from marshal_sim.oracle.oracle import Group

AT_LEAST_ONCE, AT_MOST_ONCE = 1, 2
NONE = -1
PARTITIONED: Final = frozenset({"members", "blocks"})
PRIORITY: Final = frozenset({"prioritized", "pinned", "overflow"})
EXPLICIT: Final = frozenset({"pinned", "overflow"})
OPEN: Final = frozenset({"", "balanced", "greedy"})  # policies that replace each other
FREE: Final = (NONE, NONE)
# Records of a session that is live; a Note needs none.
OF_A_SESSION: Final = frozenset(
    {
        "Heartbeat",
        "Leave",
        "Evict",
        "ClaimingPartition",
        "ReleasingPartition",
        "ClaimingMessages",
        "StepDown",
        "SeekingPartition",
    }
)

Place = tuple[str, int]  # topic, partition
Finding = tuple[str, str]  # the invariant that is broken, and how


class GroupModel:
    """Models one group by following the log record by record."""

    pause_change: int
    pause_ms: int

    def __init__(self) -> None:
        self.mode: int = 0
        self.pause_change, self.pause_ms = NONE, 0
        self.extended: dict[int, int] = {}  # live session -> its newest extension
        self.held: dict[Place, tuple[int, int]] = {}  # place -> session, epoch
        self.positions: dict[Place, int] = {}
        # Below it an owner has nothing left to give back; what lies between it and the position of a free partition was
        # granted to a session that ended (PROTOCOL.md 5).
        self.floors: dict[Place, int] = {}
        self.parked: set[Place] = set()
        self.ids: dict[str, str] = {}  # the ids of topics, if they are known
        self.settings: dict[str, Any] | None = None  # the fields of the newest GroupConfig
        self.deleted: bool = False

    @property
    def paused(self) -> bool:
        return self.pause_ms > 0

    @property
    def policy(self) -> str:
        return "" if self.settings is None else str(self.settings["policy"])

    def adopt(self, state: Group) -> None:
        """Takes over the oracle's state. Called where reading begins, and after a difference was reported."""
        self.mode, self.pause_change, self.pause_ms = state.mode, state.pause_change, state.pause_duration_ms
        self.extended = {session.id: session.extended for session in state.sessions.values()}
        self.positions = {place: part.position for place, part in state.partitions.items()}
        self.held = {place: (part.owner, part.epoch) for place, part in state.partitions.items() if part.owner != NONE}
        self.floors = {place: part.floor for place, part in state.partitions.items() if part.floor != NONE}
        self.parked = {place for place, part in state.partitions.items() if part.parked}
        self.ids = {name: topic.id for name, topic in state.topics.items() if topic.id}
        self.deleted = state.deleted
        self.settings = None if state.config is None or state.deleted else state.config.fields

    def read(self, offset: int, kind: str, fields: dict[str, Any], accepted: bool, state: Group) -> Iterator[Finding]:
        """Yields what is wrong about one record. `state` is the oracle's group, which has already folded the record."""
        if accepted:
            yield from self._forbidden(kind, fields)
            if kind == "ClaimingPartition":
                yield from self._unsettled((fields["topic"], fields["partition"]), state)
            self._follow(offset, kind, fields, state)
        elif kind == "Heartbeat" and fields["session"] in self.extended:
            yield "S15", f"a sign of life of the live session {fields['session']} does not count"
        differences = list(self._differences(state))
        if differences:
            yield from differences
            self.adopt(state)

    # --- may this record have been accepted?

    def _forbidden(self, kind: str, fields: dict[str, Any]) -> Iterator[Finding]:
        if kind in OF_A_SESSION and fields["session"] not in self.extended:
            yield "S2", f"a {kind} of session {fields['session']} counts, which is not live"
        if self.deleted and kind not in ("GroupConfig", "Note"):
            yield "S17", f"a {kind} counts in a group that is deleted"
        match kind:
            case "Evict":
                newest = self.extended.get(fields["session"], fields["observed"])
                if fields["observed"] != newest:
                    yield (
                        "S15",
                        (
                            f"session {fields['session']} was evicted as silent since {fields['observed']}, and "
                            f"{newest} extended it"
                        ),
                    )
            case "ClaimingPartition":
                place = (fields["topic"], fields["partition"])
                if place in self.held:
                    yield "S2", f"{place} is claimed while it is owned"
                if place in self.parked:
                    yield "S2", f"{place} is claimed while it is parked"
                if self.paused:
                    yield "S11", f"{place} is claimed in a pause"
            case "ReleasingPartition" | "SeekingPartition":
                released = self._place(fields)
                if released is None:
                    yield "S2", f"session {fields['session']} releases claim {fields['epoch']}, which is not its own"
                elif kind == "ReleasingPartition":
                    yield from self._forbidden_return(released, fields)
            case "ClaimingMessages":
                yield from self._forbidden_grants(fields)
            case "ReleaseGroup":
                waited_out = fields["duration_ms"] == 0 and fields["waited_ms"] >= self.pause_ms
                if fields["observed"] != self.pause_change:
                    yield "S11", f"a change of the pause saw {fields['observed']} and not {self.pause_change}"
                elif self.paused and fields["token"] != self.pause_change and not waited_out:
                    yield "S11", "the pause of somebody else changes before it was waited out"
            case "SetPosition":
                if not self.paused or fields["token"] != self.pause_change:
                    yield "S12", f"positions move outside of the pause {fields['token']} that the record names"
                for move in fields["moves"]:
                    if (move["topic"], move["partition"]) in self.held:
                        yield "S12", f"{(move['topic'], move['partition'])} moved under a live owner"
            case "Join":
                yield from self._forbidden_join(fields)
            case "GroupConfig":
                yield from self._forbidden_settings(fields)
            case _:
                pass

    def _forbidden_join(self, fields: dict[str, Any]) -> Iterator[Finding]:
        """Yields what a Join asks of a group that cannot give it, or what it lacks (F1.7)."""
        policy = self.policy
        names = self.settings["priority_groups"] if self.settings is not None and policy in PRIORITY else ("",)
        wrong = {
            "member": bool(fields["member"]) != (policy in PARTITIONED),
            "priority_group": fields["priority_group"] not in names,
            "mode": policy in EXPLICIT and fields["mode"] == AT_MOST_ONCE,
            "priority": fields["priority"] > 0 and policy != "prioritized",
            "min_pending": fields["min_pending"] > 0 and policy != "overflow",
            "min_ack_pending": fields["min_ack_pending"] > 0 and policy != "overflow",
            "claims_max": fields["claims_max"] > 0 and policy == "pinned",
        }
        for name in [name for name, is_wrong in wrong.items() if is_wrong]:
            yield "S17", f"a consumer with the {name} {fields[name]!r} joins a group with the policy {policy!r}"

    def _forbidden_settings(self, fields: dict[str, Any]) -> Iterator[Finding]:
        """Yields what a GroupConfig may not do: delete a group in use, or change what is for its life (F9.5, F9.11)."""
        if fields["deleted"]:
            if self.extended and not (self.paused and fields["token"] == self.pause_change):
                yield "S17", f"the group is deleted outside of a pause while the sessions {sorted(self.extended)} live"
            owned = [place for place in self.held if place[1] >= 0]
            if owned:
                yield "S17", f"the group is deleted while {owned[0]} is owned"
            return
        if (self.settings is not None or self.mode) and not {self.policy, fields["policy"]} <= OPEN:
            before = self.settings or {"policy": ""}
            stays = ["policy"]
            stays += ["max_members"] if self.policy in PARTITIONED else []
            stays += ["priority_groups"] if self.policy in PRIORITY else []
            for name in stays:
                if before[name] != fields[name]:
                    yield "S17", f"the {name} of a group changes from {before[name]!r} to {fields[name]!r}"

    def _forbidden_return(self, place: Place, fields: dict[str, Any]) -> Iterator[Finding]:
        """Yields what is wrong about giving messages back.

        An owner that does so must have read all its grants, and gives back no more than these (F6.3).
        """
        if self.mode != AT_MOST_ONCE or place[1] < 0 or fields["observed"] == NONE:
            return
        position, first = self.positions.get(place, NONE), self.floors.get(place, NONE)
        if fields["observed"] != position:
            yield "S6", f"{place} is given back by a session that saw {fields['observed']} and not {position}"
        if not first <= fields["give"] <= position:
            yield "S6", f"{place} is given back to {fields['give']}, and only {first} to {position} can be given back"

    def _unsettled(self, place: Place, state: Group) -> Iterator[Finding]:
        """Yields what is wrong about the range that the verdict on an accepted claim names as unsettled (F4.5)."""
        position, floor = self.positions.get(place, NONE), self.floors.get(place, NONE)
        wanted = (floor, position) if self.mode == AT_MOST_ONCE and NONE < floor < position else None
        if state.unsettled != wanted:
            yield "S18", f"the claim of {place} leaves {state.unsettled} unsettled, and must leave {wanted}"

    def _forbidden_grants(self, fields: dict[str, Any]) -> Iterator[Finding]:
        positions = dict(self.positions)
        for wanted in fields["ranges"]:
            place = self._place({"session": fields["session"], "epoch": wanted["epoch"]})
            if place is None:
                yield "S6", f"messages are granted to claim {wanted['epoch']}, not session {fields['session']}'s"
                continue
            known, positions[place] = positions.get(place, NONE), wanted["to"]
            if wanted["start"] < known:
                yield "S6", f"a grant of {place} begins below what was granted"
            elif wanted["from"] != known:
                yield "S6", f"a grant of {place} from {wanted['from']} on leaves {known} out"
        if self.mode != AT_MOST_ONCE:
            yield "S6", "messages are granted in a group that is not at most once"
        if self.paused:
            yield "S11", "messages are granted in a pause"

    def _place(self, fields: dict[str, Any]) -> Place | None:
        """Returns the partition that this session holds by this epoch, or None."""
        wanted = (fields["session"], fields["epoch"])
        return next((place for place, claim in self.held.items() if claim == wanted), None)

    # --- what follows from it

    def _follow(self, offset: int, kind: str, fields: dict[str, Any], state: Group) -> None:
        match kind:
            case "Join":
                self._end(fields["predecessor"])
                self.extended[offset] = offset
                self.mode = self.mode or fields["mode"]
            case "Heartbeat":
                self._heartbeat(offset, fields)
            case "Leave" | "Evict":
                self._end(fields["session"])
            case "ClaimingPartition":
                place = (fields["topic"], fields["partition"])
                self.held[place] = (fields["session"], offset)
                if self.positions.get(place, NONE) == NONE and place[1] >= 0:
                    self.positions[place] = fields["start"]
                if place[1] >= 0:
                    self.floors[place] = self.positions[place]
            case "ReleasingPartition":
                self._release(fields)
            case "SeekingPartition":
                sought = self._place(fields)
                if sought is not None:
                    self.held[sought] = (fields["session"], offset)
                    self.positions[sought] = self.floors[sought] = fields["position"]
            case "ClaimingMessages":
                for wanted in fields["ranges"]:
                    granted = self._place({"session": fields["session"], "epoch": wanted["epoch"]})
                    if granted is not None:
                        self.positions[granted] = wanted["to"]
            case "ReleaseGroup":
                self.pause_change, self.pause_ms = offset, fields["duration_ms"]
            case "SetPosition":
                moves = {(move["topic"], move["partition"]): move["position"] for move in fields["moves"]}
                self.positions |= moves
                self._forget(moves.keys())
                if fields["resume"]:
                    self.pause_change, self.pause_ms = offset, 0
            case "Topology":
                self._topology(fields["topic"], fields["partitions"], fields["topic_id"])
            case "GroupConfig":
                self._configure(offset, fields)
            case _:
                pass

    def _end(self, session: int) -> None:
        """Ends a session, if it is live. In at-most-once mode the floors of its claims stay (F3.3)."""
        self.extended.pop(session, None)
        if self.mode != AT_MOST_ONCE:
            self.floors = {place: at for place, at in self.floors.items() if self.held.get(place, FREE)[0] != session}
        self.held = {place: claim for place, claim in self.held.items() if claim[0] != session}

    def _heartbeat(self, offset: int, fields: dict[str, Any]) -> None:
        """Applies a heartbeat. In a pause it does not extend a session that keeps a partition (F2.2). It moves
        positions, in at-most-once mode floors (F2.3).
        """
        session = fields["session"]
        mine = {epoch: place for place, (owner, epoch) in self.held.items() if owner == session and place[1] >= 0}
        if session in self.extended and not (self.paused and mine):
            self.extended[session] = offset
        for entry in fields["claims"]:
            place, handled = mine.get(entry["epoch"]), entry["position"]
            if place is None:
                continue
            if self.mode == AT_LEAST_ONCE:
                self.positions[place] = max(handled, self.positions.get(place, NONE))
            elif handled <= self.positions.get(place, NONE):
                self.floors[place] = max(handled, self.floors.get(place, NONE))

    def _release(self, fields: dict[str, Any]) -> None:
        """Applies a Release (F6.2 to F6.4). In at-most-once mode it may lower the position, to give back what was
        granted.
        """
        place = self._place(fields)
        if place is None:
            return
        del self.held[place]
        self.floors.pop(place, None)
        position = self.positions.get(place, NONE)
        if self.mode == AT_LEAST_ONCE and place[1] >= 0:
            self.positions[place] = max(position, fields["position"])
        elif self.mode == AT_MOST_ONCE and place[1] >= 0 and fields["observed"] != NONE:
            self.positions[place] = fields["give"]
        if fields["parked"] and place[1] >= 0:
            self.parked.add(place)

    def _topology(self, topic: str, count: int, topic_id: str) -> None:
        """Forgets the positions from partition `count` on, or all positions of a recreated topic (F9.2, F9.10)."""
        known = self.ids.get(topic, "")
        least = 0 if "" not in (known, topic_id) and known != topic_id else count
        self.ids[topic] = topic_id or known
        gone = {place for place in self.positions if place[0] == topic and place[1] >= least}
        self.positions |= dict.fromkeys(gone, NONE)
        self._forget(gone)

    def _forget(self, places: Set[Place]) -> None:
        """Begins a new generation of these partitions."""
        self.parked -= places
        for place in places:
            self.floors.pop(place, None)

    def _configure(self, offset: int, fields: dict[str, Any]) -> None:
        """Applies a GroupConfig: it deletes the group, or changes the mode, which ends all sessions (F9.5, F9.6)."""
        self.deleted, self.settings = fields["deleted"], None if fields["deleted"] else fields
        if fields["deleted"]:
            self.extended.clear()
            self.held.clear()
            self.mode, self.pause_change, self.pause_ms = 0, offset, 0
            self.positions.clear()
            self.parked.clear()
            self.floors.clear()
            self.ids.clear()
        elif fields["mode"]:
            if self.mode not in (0, fields["mode"]):
                self.extended.clear()
                self.held.clear()
                self.parked.clear()
                self.floors.clear()
            self.mode = fields["mode"]

    # --- does the oracle hold the same?

    def _differences(self, state: Group) -> Iterator[Finding]:
        live = {session.id: session.extended for session in state.sessions.values()}
        if live.keys() != self.extended.keys():
            yield "S2", f"the sessions {sorted(live)} are live, and must be {sorted(self.extended)}"
        for session in live.keys() & self.extended.keys():
            if live[session] != self.extended[session]:
                yield (
                    "S15",
                    (
                        f"the newest extension of session {session} is {live[session]}, and must be "
                        f"{self.extended[session]}"
                    ),
                )
        for place, part in state.partitions.items():
            held, position = self.held.get(place, FREE), self.positions.get(place, NONE)
            if (part.owner, part.epoch) != held:
                yield "S2", f"{place} is owned by {(part.owner, part.epoch)} (session, claim), and must be by {held}"
            if part.position != position:
                yield "S10", f"the position of {place} is {part.position}, and must be {position}"
            if part.floor != self.floors.get(place, NONE):
                yield "S18", f"the floor of {place} is {part.floor}, and must be {self.floors.get(place, NONE)}"
        if (state.pause_change, state.pause_duration_ms) != (self.pause_change, self.pause_ms):
            yield (
                "S11",
                (
                    f"the pause is {state.pause_change} for {state.pause_duration_ms} ms, and must be "
                    f"{self.pause_change} for {self.pause_ms} ms"
                ),
            )
