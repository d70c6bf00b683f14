"""Keys that sign admin records in tests: always the same ones, so that logs are."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from marshal_py.protocol.wire.signatures import SigningKey


def key_of(seed: int) -> SigningKey:
    private = Ed25519PrivateKey.from_private_bytes(bytes((seed,)) * 32)
    return SigningKey(private.public_key().public_bytes_raw(), private.sign)
