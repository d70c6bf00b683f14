"""Saves and loads the file that a consumer writes, for a bug report, when its state is wrong (PROTOCOL.md G7, G8).

The log can be folded again at any time, but the state of this process is gone when it ends. So the file holds only the
group's state in this process, the log's offset, and the digests that differ. `marshal explain GROUP --state FILE`
compares the file with the log.
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
from marshal_py.history.explain import left_out, plain_state
from marshal_py.protocol.member.member import Member

logger: Final = logging.getLogger("marshal_py")

VERSION: Final = 1
KEPT: Final = "a file that a consumer kept when it ended with Diverged"
BYTES_MAX: Final = 8_388_608  # per file: room for a group of 30,000 partitions; larger states are cut
ENTRIES_MAX: Final = 65_536  # of sessions, and of partitions, in the first attempt
NAME_CHARACTERS_MAX: Final = 60  # of the group's name in the file's name


def save(member: Member, error: Diverged, folder: str | None, library: str, time_ms: int) -> str:
    """Writes the file into `folder` ("": for temporary files) and returns its path; "" if that fails, which it logs, or
    for None."""
    if folder is None:
        return ""
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
        # Only this user can read it: a state names clients and positions.
        number, path = tempfile.mkstemp(".json", f"marshal-diverged-{safe}-{error.offset}-", folder or None)
        with os.fdopen(number, "wb") as file:
            file.write(data + b"\n")
    except OSError as failed:
        logger.warning("group %s: the state that differs could not be kept: %s", member.name, failed)
        return ""
    return path


def load(path: Path, group: str) -> dict[str, Any]:
    """Returns the content of a file that `save` wrote. Raises InvalidOption for any other file or another group."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidOption("--state", str(path), f"{KEPT}: {error}") from error
    if not isinstance(found, dict) or found.get("evidence") != "marshal" or found.get("version") != VERSION:
        raise InvalidOption("--state", str(path), f"{KEPT}, of version {VERSION}")
    if found["group"] != group:
        raise InvalidOption("--state", str(path), f"of group {group!r}; it is of {found['group']!r}")
    return found
