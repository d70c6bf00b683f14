"""The demo's messages: orders that carry a checksum of their key and number. Pure."""

from __future__ import annotations

import json
import zlib
from typing import Final

KEYS: Final = 500  # many keys per partition, many messages per key


def order(number: int) -> tuple[bytes, bytes]:
    """Returns key and value of the order with this number."""
    key = f"customer-{number * 7919 % KEYS}"  # a prime step, so that neighbours go to different partitions
    body = f"{key}/{number}"
    return key.encode(), json.dumps({"order": number, "checksum": zlib.crc32(body.encode())}).encode()


def checksum_fits(key: bytes | None, value: bytes | None) -> bool:
    """Returns whether key, number and checksum of a message belong together, as its producer wrote them."""
    try:
        content = json.loads(value or b"")
        body = f"{(key or b'').decode()}/{content['order']}"
        return bool(content["checksum"] == zlib.crc32(body.encode()))
    except (ValueError, KeyError, TypeError):
        return False
