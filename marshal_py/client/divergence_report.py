"""What a consumer keeps of its state when it is found to be the broken one (PROTOCOL.md G7, G8): for a bug report.

The log stays, and what it says can be folded again at any time; what this process held is gone when it ends. So that
is what is kept, and nothing else: the group's state as held, where in the log, and what it differs from.
`marshal diff GROUP --state FILE` compares it with the log.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from marshal_py.errors import Diverged, InvalidOption
from marshal_py.history.states import left_out, plain_state
from marshal_py.protocol.member import Member

logger = logging.getLogger("marshal_py")

VERSION: Final = 1
KEPT: Final = "a file that a consumer kept when it ended with Diverged"
BYTES_MAX: Final = 8_388_608  # of a file: a group of 30,000 partitions; larger states are cut
ENTRIES_MAX: Final = 65_536  # of sessions, and of partitions, before the first look at the size
NAME_CHARACTERS_MAX: Final = 60  # of the group's name in the file's name


def save(member: Member, error: Diverged, folder: str, library: str, time_ms: int) -> str:
    """Writes the file; its path, or "" if it could not be written, which is logged. `folder`: "" is the system's."""
    world = member.world
    fields: dict[str, Any] = {
        "evidence": "marshal",
        "version": VERSION,
        "by": library,
        "time_ms": time_ms,
        "group": member.name,
        "log": world.log,
        "incarnation": world.genesis.incarnation.hex() if world.genesis is not None else "",
        "client_id": member.options.client_id,
        "session": member.session,
        "at_offset": world.next_offset - 1,
        "first_difference": error.offset,
        "held": f"{error.held:016x}",
        "again": f"{error.again:016x}",
        "reason": error.reason,
    }
    most = ENTRIES_MAX
    while True:
        data = msgspec.json.encode(
            {**fields, "left_out": left_out(member.group, most), "state": plain_state(member.group, most)}
        )
        if len(data) <= BYTES_MAX:
            break
        most //= 2
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", member.name)[:NAME_CHARACTERS_MAX]
    try:
        # Readable by this user alone: a state names clients and positions.
        number, path = tempfile.mkstemp(".json", f"marshal-diverged-{safe}-{error.offset}-", folder or None)
        with os.fdopen(number, "wb") as file:
            file.write(data + b"\n")
    except OSError as failed:
        logger.warning("group %s: the state that differs could not be kept: %s", member.name, failed)
        return ""
    return path


def load(path: Path, group: str) -> dict[str, Any]:
    """What `save` wrote. Raises InvalidOption if it is something else, or of another group."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidOption("--state", str(path), f"{KEPT}: {error}") from error
    if not isinstance(found, dict) or found.get("evidence") != "marshal" or found.get("version") != VERSION:
        raise InvalidOption("--state", str(path), f"{KEPT}, of version {VERSION}")
    if found["group"] != group:
        raise InvalidOption("--state", str(path), f"of group {group!r}; it is of {found['group']!r}")
    return found
