"""Defines the fencing token of a claim, which a store compares to refuse a stale owner (PROTOCOL.md K1)."""

from __future__ import annotations

import re
from typing import NamedTuple

from marshal_py.errors import InvalidOption

_TOKEN = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")


class Token(NamedTuple):
    """The fencing token of a claim (PROTOCOL.md K1). A later claim's token is greater, also as a text.

    `incarnation`: 16 bytes that name the coordination topic; they change if it is created again. `epoch`: offset of the
    claim's record.
    """

    incarnation: bytes
    epoch: int

    def __str__(self) -> str:
        return f"{self.incarnation.hex()}-{self.epoch:016x}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Returns the token that `str(token)` printed. Raises InvalidOption for any other text."""
        if _TOKEN.fullmatch(text):
            return cls(bytes.fromhex(text[:32]), int(text[33:], 16))
        raise InvalidOption("token", text, "32 hex digits, a dash, 16 hex digits")
