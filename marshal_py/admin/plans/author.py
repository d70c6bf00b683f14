"""Defines how an admin signs the records that it writes (`by`). Pure: the caller passes the names of user and host."""

from __future__ import annotations

from typing import Final, NamedTuple

BY_BYTES_MAX: Final = 255  # of a text in a record (PROTOCOL.md 4.2)
RUN_BYTES: Final = 4  # two runs of one person at one moment must tell their records apart


class Author(NamedTuple):
    """The author of one run's records. `who`: the same for every run of a person on a machine; `by`: unique to this
    run."""

    who: str
    by: str

    @classmethod
    def of(cls, user: str, host: str, tool: str, random: bytes) -> Author:
        """Returns the author for one run, unique by RUN_BYTES `random` bytes. Names that are too long are cut, never
        the unique part."""
        tail = f" {tool} run {random.hex()}"
        who = f"{user}@{host}".replace(" ", "_")
        left = BY_BYTES_MAX - len(tail.encode())
        who = who.encode()[:left].decode(errors="ignore")
        return cls(who, who + tail)

    def signed(self, reason: str) -> str:
        """Returns `by` with the reason behind a colon, cut to fit, for a record that has no field for the reason."""
        if not reason:
            return self.by
        return f"{self.by}: {reason}".encode()[:BY_BYTES_MAX].decode(errors="ignore")

    def wrote(self, by: str) -> bool:
        """Returns whether this very run wrote the record that is signed `by` (M1)."""
        return by == self.by or by.startswith(f"{self.by}:")

    def is_also(self, by: str) -> bool:
        """Returns whether the same person, on the same machine, wrote the record that is signed `by` (M2)."""
        return by.partition(" ")[0] == self.who
