"""The keys of whom may administer groups: makes them, reads them from files, and from texts (PROTOCOL.md, rule 11).

A file has the private half in PKCS#8, PEM. Nothing here prints it, and no error contains it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

from marshal_py.errors import InvalidOption, UnsupportedPlatform
from marshal_py.protocol.wire.records import ADMIN_KEYS_MAX
from marshal_py.protocol.wire.signatures import VERIFIES, SigningKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_HEX: Final = re.compile("[0-9a-f]{64}")


def generate(file: Path) -> str:
    """Writes a new key into a file that does not exist, for its owner alone, and returns the public half in hex. Raises
    InvalidOption for a file that cannot be made, UnsupportedPlatform."""
    _check()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
            made.write(text)
    except OSError as error:
        raise InvalidOption("file", str(file), f"a file that can be created: {error.strerror}") from error
    return _public(key).hex()


def read(file: str | PathLike[str], named: str = "sign_with") -> SigningKey:
    """Returns the key of a file, which the argument `named` gave. Raises InvalidOption for one without an Ed25519 key,
    UnsupportedPlatform."""
    _check()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(Path(file).read_bytes(), None)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidOption(named, str(file), "a file of `marshal keys FILE --generate`")
    return SigningKey(_public(key), key.sign)


def check(given: object) -> None:
    """Raises InvalidOption unless these are public halves of keys in hex, UnsupportedPlatform."""
    if not isinstance(given, list | tuple) or len(given) > ADMIN_KEYS_MAX:
        raise InvalidOption("admin_keys", given, f"a list of at most {ADMIN_KEYS_MAX} public keys")
    for text in given:
        if not isinstance(text, str) or _HEX.fullmatch(text) is None:
            raise InvalidOption("admin_keys", text, "64 hex digits, as `marshal keys FILE` prints them")
    if given:
        _check()


def parsed(given: Iterable[str]) -> tuple[bytes, ...]:
    """Returns the keys of texts that `check` has accepted, each one once, in the order of a record."""
    return tuple(sorted({bytes.fromhex(text) for text in given}))


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _check() -> None:
    if not VERIFIES:
        raise UnsupportedPlatform("a key", "a Python without `cryptography`", "pip install 'marshal_py[keys]'")
