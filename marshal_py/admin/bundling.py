"""What `marshal log dump --bug-report` writes besides the records, and what of these it leaves out.

Nothing of a message gets in: neither keys nor values are in the log, and the texts of handlers, which may quote them,
are left out, as is what others wrote into the topic. Of the client's settings only those are shown that can be no
secret; another value is replaced wherever it occurs. Names, reasons that admins gave, and client ids stay: without
them the log says little.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast
from zlib import crc32

from msgspec import structs, to_builtins

from marshal_py.admin.marshal import versions
from marshal_py.admin.views.group_info import Check, GroupHealth
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import Genesis, Note
from marshal_py.transport.ports import ClusterInfo, LogRecord

LEFT_OUT: Final = "(left out of the bundle)"
HIDDEN: Final = "(hidden)"
OWN_TEXTS: Final = frozenset(  # kinds of Notes whose texts this library writes, without words of a program
    {"probe", "unreadable", "mirror_refused", "diverged", "uncommitted", "poison_message", "offset_lost"}
)
SHOWN: Final = frozenset(
    {
        "bootstrap.servers",
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "ssl.endpoint.identification.algorithm",
        "enable.ssl.certificate.verification",
        "client.id",
        "client.rack",
        "compression.type",
        "debug",
        "group.id",
        "isolation.level",
        "linger.ms",
        "log_level",
    }
)
SHOWN_FAMILIES: Final = (
    "api.version.",
    "broker.address.",
    "fetch.",
    "message.",
    "metadata.",
    "queue.buffering.",
    "queued.",
    "reconnect.backoff.",
    "retry.backoff.",
    "socket.",
    "topic.metadata.",
)
SECRET_NAMES: Final = ("jaas", "key", "password", "secret", "token", "username")  # parts of the names of settings
SECRET_CHARS_MIN: Final = 4  # a shorter value would be replaced in every other word
OTHER_CHARS_MIN: Final = 8  # of settings with other names: `true`, or a time in ms, is no secret


def about(
    settings: Mapping[str, Any], checks: Iterable[Check], health: GroupHealth, cluster: ClusterInfo, left_out: int
) -> dict[str, Any]:
    """Returns what the header of a bundle has, in JSON's types. `settings`: the client's; `left_out`: how many records
    `without_words` changes."""
    used = {**versions(cluster), "python": platform.python_version(), "system": platform.platform()}
    made = Check("bundle", "ok", ", ".join(f"{name} {version}" for name, version in used.items()))
    hidden = {name: str(value) for name, value in settings.items() if not _is_shown(name)}
    secrets = {value for name, value in hidden.items() if len(value) >= _chars_min(name)}
    found = {
        "versions": used,
        "cluster": {"id": cluster.cluster_id, "brokers": to_builtins(cluster.brokers), "limits": cluster.limits()},
        "settings": {name: HIDDEN if name in hidden else str(value) for name, value in sorted(settings.items())},
        "checks": to_builtins([made, *checks]),
        "health": to_builtins(health),
        "left_out": left_out,
    }
    return cast(dict[str, Any], _without(found, sorted(secrets, key=len, reverse=True)))  # one may be in another


def _is_shown(name: str) -> bool:
    return name in SHOWN or name.startswith(SHOWN_FAMILIES)


def _chars_min(name: str) -> int:
    """Returns how long the value of a setting must be so that it is replaced where it occurs."""
    return SECRET_CHARS_MIN if any(part in name for part in SECRET_NAMES) else OTHER_CHARS_MIN


def _without(value: Any, secrets: Sequence[str]) -> Any:
    """Returns a value of JSON with other words for the secrets in its texts."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, dict):
        return {key: _without(each, secrets) for key, each in value.items()}
    return [_without(each, secrets) for each in value] if isinstance(value, list | tuple) else value


def without_words(root: Genesis | None, record: LogRecord) -> LogRecord:
    """Returns a record without what a program or somebody else may have written into it: the texts of its Note, or all
    of it, if it is none of this log's. The fold judges both alike."""
    seed = NONE if root is None else crc32(root.incarnation)
    envelope = codec.open_envelope(record.value, seed)
    if envelope is None:
        return record if not (record.key or record.value) else record._replace(key=None, value=record.value and b"")
    group, _, version, kind, body, _ = envelope
    note = codec.decode_body(kind, body)
    if root is None or not isinstance(note, Note) or not note.text or note.kind in OWN_TEXTS:
        return record
    value = codec.encode(structs.replace(note, text=LEFT_OUT), group, root.incarnation, version)
    return record._replace(value=value)
