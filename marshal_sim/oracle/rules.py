"""The oracle's rules 1 to 9 and 11 of PROTOCOL.md, one function for each type of record.

Each takes the group, the record's fields, its offset and its body. It returns the reason of the rejection, or "" if it
accepted the record and changed the group. No rule changes anything before its last check. `claiming_messages` judges
range by range (F5.1) and says "" if one was granted. Like the rest of the oracle this was written from PROTOCOL.md
alone, and imports nothing of marshal_py but the oracle's own state and decoder.
"""

from collections.abc import Callable, Iterable
from typing import Any

from marshal_sim.oracle.ed25519 import verify
from marshal_sim.oracle.state import Group, Partition, Session, Topic
from marshal_sim.oracle.wire import Record

AT_LEAST_ONCE, AT_MOST_ONCE = 1, 2
GRANT_MAX = 1_000_000
EVICT_INTERVALS = 2  # F3.2


def join(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
    if any(session.join["instance_id"] == fields["instance_id"] for session in group.sessions.values()):
        return "instance"
    if group.mode != 0 and fields["mode"] != group.mode:
        return "mode"
    predecessor = group.sessions.get(fields["predecessor"])
    if predecessor is not None and predecessor.join["client_id"] != fields["client_id"]:
        return "predecessor"
    if not fits(fields, policy_of(group), group.config.fields["priority_groups"] if group.config is not None else ()):
        return "config"
    if predecessor is not None:
        group.end_session(predecessor.id)
    group.sessions[offset] = Session(offset, fields, body, offset)
    group.mode = fields["mode"]
    return ""


def policy_of(group: Group) -> str:
    return "" if group.config is None else str(group.config.fields["policy"])


def fits(join: dict[str, Any], policy: str, priority_groups: Iterable[str]) -> bool:
    """F1.7: whether the Join says what the policy asks for, and nothing that it does not obey."""
    if policy in ("members", "blocks"):
        if join["member"] == "":
            return False
    elif join["member"] != "":
        return False
    if policy in ("prioritized", "pinned", "overflow"):
        if join["priority_group"] not in priority_groups:
            return False
    elif join["priority_group"] != "":
        return False
    if join["priority"] > 0 and policy != "prioritized":
        return False
    if (join["min_pending"] > 0 or join["min_ack_pending"] > 0) and policy != "overflow":
        return False
    if policy in ("pinned", "overflow") and join["mode"] != AT_LEAST_ONCE:
        return False
    return not (policy == "pinned" and join["claims_max"] > 0)


def heartbeat(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    session = group.sessions.get(fields["session"])
    if session is None:
        return "session"
    holds = any(place[1] >= 0 and part.owner == session.id for place, part in group.partitions.items())
    if not (group.paused and holds):
        session.extended = offset
    late = fields["sequence"] < session.sequence
    if not late:
        session.sequence = fields["sequence"]
        session.ready, session.idle_ms = fields["ready"], fields["idle_ms"]
    for entry in fields["claims"]:
        found = group.claim(session.id, entry["epoch"])
        if found is None or found[0][1] < 0:
            continue
        partition = found[1]
        if group.mode == AT_LEAST_ONCE:
            if entry["position"] < partition.position or (late and entry["position"] == partition.position):
                continue
            partition.position = entry["position"]
            partition.attempts, partition.progress = entry["attempts"], entry["progress"]
        elif partition.floor <= entry["position"] <= partition.position:
            partition.floor = entry["position"]
        partition.lag, partition.in_flight = entry["lag"], entry["in_flight"]
    return ""


def leave(group: Group, fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    group.end_session(fields["session"])
    return ""


def evict(group: Group, fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    session = group.sessions.get(fields["session"])
    if session is None:
        return "session"
    if fields["observed"] != session.extended:
        return "observed"
    if fields["waited_ms"] < EVICT_INTERVALS * session.join["interval_ms"]:
        return "waited"
    group.end_session(session.id)
    return ""


def claiming_partition(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    topic, number = fields["topic"], fields["partition"]
    if fields["session"] not in group.sessions:
        return "session"
    if group.paused:
        return "paused"
    # Only the pin has an empty topic (4.2), and it asks for no topology; -1 is below every count (F4.1).
    if topic != "" and not group.below_count(topic, number):
        return "topology"
    partition = group.partition(topic, number)
    if partition.parked != "":
        return "parked"
    if partition.owner != -1:
        return "held"
    if fields["observed"] != partition.version:
        return "observed"
    if number >= 0 and partition.position == -1:
        if fields["start"] == -1:
            return "start"
        partition.position = fields["start"]
    group.unsettled = None
    if group.mode == AT_MOST_ONCE and -1 < partition.floor < partition.position:
        group.unsettled = (partition.floor, partition.position)
    partition.owner, partition.epoch, partition.version, partition.successor = fields["session"], offset, offset, -1
    if number >= 0:
        partition.floor = partition.position
        if group.mode == AT_LEAST_ONCE:
            partition.attempts = min(partition.attempts + 1, 2**53)
    group.partitions[topic, number] = partition
    return ""


def claiming_messages(group: Group, fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    if group.mode != AT_MOST_ONCE:
        return "mode"
    if group.paused:
        return "paused"
    # In order: a range is judged by the position that the ranges before it have left.
    reasons = [message_range(group, fields["session"], asked) for asked in fields["ranges"]]
    granted = tuple(index for index, reason in enumerate(reasons) if reason == "")
    if not granted:
        return reasons[0]
    group.granted = granted
    return ""


def message_range(group: Group, session: int, asked: dict[str, int]) -> str:
    """Grants one range and returns "", or returns why it is refused (F5.1, F5.2)."""
    found = group.claim(session, asked["epoch"])
    if found is None or found[0][1] < 0:
        return "claim"
    if asked["from"] != found[1].position:
        return "from"
    if not asked["from"] <= asked["start"] < asked["to"] or asked["to"] - asked["start"] > GRANT_MAX:
        return "range"
    found[1].position = asked["to"]
    return ""


def releasing_partition(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    found = group.claim(fields["session"], fields["epoch"])
    if found is None:
        return "claim"
    (_, number), partition = found
    # There is no position on a whole topic or on the pin: nothing to give back, nothing to park (F6.2, F6.3, F6.4).
    if number >= 0 and group.mode == AT_LEAST_ONCE:
        if fields["position"] >= partition.position:
            partition.position, partition.attempts = fields["position"], fields["attempts"]
            partition.in_flight, partition.progress = fields["in_flight"], fields["progress"]
    elif number >= 0:
        if fields["observed"] != -1:
            if fields["observed"] != partition.position:
                return "observed"
            if not partition.floor <= fields["give"] <= partition.position:
                return "range"
            partition.position = fields["give"]
        partition.in_flight = fields["in_flight"]
    if number >= 0:
        partition.parked = fields["parked"]
    group.free(partition, fields["successor"])
    partition.version = offset
    return ""


def seeking_partition(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    found = group.claim(fields["session"], fields["epoch"])
    if found is None or found[0][1] < 0:
        return "claim"
    if group.mode != AT_LEAST_ONCE:
        return "mode"
    if group.paused:
        return "paused"
    partition = found[1]
    partition.new_generation()
    partition.position = partition.floor = fields["position"]
    partition.attempts = 1
    partition.epoch = partition.version = offset
    return ""


def release_group(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    if fields["observed"] != group.pause_change:
        return "observed"
    waited_out = fields["duration_ms"] == 0 and fields["waited_ms"] >= group.pause_duration_ms
    if group.paused and fields["token"] != group.pause_change and not waited_out:
        return "paused"
    group.pause_change, group.pause_duration_ms = offset, fields["duration_ms"]
    return ""


def set_position(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    moves = [((move["topic"], move["partition"]), move) for move in fields["moves"]]
    if not group.paused:
        return "paused"
    if fields["token"] != group.pause_change:
        return "token"
    if not moves:
        return "empty"
    if len({place for place, _ in moves}) != len(moves):
        return "repeats"
    # F8.2: each reason is checked for all moves before the next reason is.
    if any(group.partition(*place).version != move["observed"] for place, move in moves):
        return "observed"
    if not all(group.below_count(*place) for place, _ in moves):
        return "topology"
    if any(group.partition(*place).owner != -1 for place, _ in moves):
        return "held"
    for place, move in moves:
        partition = group.partitions[place] = group.partition(*place)
        partition.new_generation()
        partition.position, partition.version = move["position"], offset
    if fields["resume"]:
        group.pause_duration_ms, group.pause_change = 0, offset
    return ""


def forget(partitions: list[Partition], offset: int) -> None:
    """Forgets everything about these partitions, except the last owner and the successor, which F9.2 does not name."""
    for partition in partitions:
        partition.new_generation()
        partition.position, partition.version = -1, offset


def topology(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    name, count = fields["topic"], fields["partitions"]
    known = group.topics.get(name)
    if fields["observed"] != (group.deleted_at if known is None else known.offset):
        return "observed"
    if known is None:
        group.topics[name] = Topic(count, count, offset, fields["topic_id"])
        return ""
    topic_id = fields["topic_id"] or known.id
    if (count, topic_id) == (known.count, known.id):
        return "same"
    of_topic = {place[1]: partition for place, partition in group.partitions.items() if place[0] == name}
    if known.id not in ("", topic_id):
        # F9.10: recreated. No session may own the topic as a whole either; all that has a position is forgotten.
        fails = group.config is not None and group.config.fields["on_topic_recreated"] == "fail"
        if fails and not group.pause_held_by(fields["token"]):
            return "token"
        if any(partition.owner != -1 for partition in of_topic.values()):
            return "held"
        forget([partition for number, partition in of_topic.items() if number >= 0], offset)
        known.first_count = 0
    elif count < known.count:
        beyond = [partition for number, partition in of_topic.items() if number >= count]
        if not group.pause_held_by(fields["token"]):
            return "token"
        if any(partition.owner != -1 for partition in beyond):
            return "held"
        forget(beyond, offset)
    known.count, known.offset, known.id = count, offset, topic_id
    return ""


def group_config(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
    if fields["observed"] != group.config_offset:
        return "observed"
    if fields["deleted"]:
        if not group.pause_held_by(fields["token"]):
            if group.sessions:
                return "sessions"
            if group.keys:
                return "token"  # F11.4
        if owned(group):
            return "held"
        for session in list(group.sessions):
            group.end_session(session)
        delete_group(group, offset)
    elif changes_what_stays(group, fields):
        return "lifelong"
    elif fields["mode"] != 0 and group.mode not in (0, fields["mode"]):
        if not group.pause_held_by(fields["token"]):
            return "token"
        if owned(group):
            return "held"
        for session in list(group.sessions):
            group.end_session(session)
        for place, partition in group.partitions.items():
            if place[1] >= 0:
                partition.new_generation()
        group.mode = fields["mode"]
    elif fields["mode"] != 0:
        group.mode = fields["mode"]
    group.config, group.config_body, group.config_offset = Record("GroupConfig", fields), body, offset
    for live in group.sessions.values():
        live.mark = -1
    return ""


def owned(group: Group) -> bool:
    return any(partition.owner != -1 for place, partition in group.partitions.items() if place[1] >= 0)


def changes_what_stays(group: Group, wanted: dict[str, Any]) -> bool:
    """F9.11: whether settings that are for the group's whole life would become others."""
    has = group.config is not None and not group.config.fields["deleted"]
    if not has and group.mode == 0:
        return False  # nothing has begun
    before = policy_of(group) if has else ""
    if before != wanted["policy"]:
        return not (before in ("", "balanced", "greedy") and wanted["policy"] in ("", "balanced", "greedy"))
    if group.config is None or not has:
        return False
    if before in ("members", "blocks"):
        return bool(group.config.fields["max_members"] != wanted["max_members"])
    if before in ("prioritized", "pinned", "overflow"):
        return tuple(group.config.fields["priority_groups"]) != tuple(wanted["priority_groups"])
    return False


def delete_group(group: Group, offset: int) -> None:
    """Deletes the group's state (F9.5). The mode in the deleting record is not read, because a deleted group has
    none.
    """
    group.topics.clear()
    group.partitions.clear()
    group.mode = group.pause_duration_ms = 0
    group.pause_change = group.deleted_at = offset


def step_down(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    session = group.sessions.get(fields["session"])
    if session is None:
        return "session"
    if fields["observed"] != session.mark:
        return "observed"
    session.mark = offset
    return ""


def needs_key(record: Record) -> bool:
    """Returns whether a group with keys takes the record from holders of a key alone (F11.2)."""
    if record.type == "Topology":
        return bool(record.fields["token"] != -1)
    return record.type in ("ReleaseGroup", "SetPosition", "GroupConfig")


def unsigned(group: Group, record: Record) -> str:
    """Returns why a group with keys refuses a record that nobody has signed, or "" (F11.2)."""
    if not group.keys or not needs_key(record):
        return ""
    if record.type == "ReleaseGroup" and record.fields["duration_ms"] == 0 and group.paused:
        return "" if record.fields["waited_ms"] >= group.pause_duration_ms else "unsigned"
    return "unsigned"


def signature(group: Group, name: str, fields: dict[str, Any], incarnation: bytes) -> str:
    """Returns why a Signed is refused whatever it carries, or "" (F11.3)."""
    if fields["key"] not in group.keys:
        return "key"
    if fields["observed"] != group.config_offset:
        return "observed"
    named = name.encode("utf-8")
    parts = [b"marshal admin record", incarnation, bytes([len(named)]), named]
    parts += [fields["observed"].to_bytes(8, "big"), bytes([fields["kind"]]), fields["body"]]
    return "" if verify(fields["key"], fields["signature"], b"".join(parts)) else "signature"


def note(_group: Group, _fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    return ""


RULES: dict[str, Callable[[Group, dict[str, Any], int, bytes], str]] = {
    "Join": join,
    "Heartbeat": heartbeat,
    "Leave": leave,
    "Evict": evict,
    "ClaimingPartition": claiming_partition,
    "ReleasingPartition": releasing_partition,
    "ClaimingMessages": claiming_messages,
    "ReleaseGroup": release_group,
    "SetPosition": set_position,
    "Topology": topology,
    "GroupConfig": group_config,
    "StepDown": step_down,
    "Note": note,
    "SeekingPartition": seeking_partition,
}
