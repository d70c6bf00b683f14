"""Verifies Ed25519 signatures with integers alone (RFC 8032, 5.1.7, without the cofactor), as PROTOCOL.md's F11.3 asks.

Slow and plain, and of another origin than the arithmetic of `cryptography`, like the rest of the oracle.
"""

import hashlib

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
ROOT = pow(2, (P - 1) // 4, P)  # of -1

Point = tuple[int, int, int, int]  # extended coordinates: x = X/Z, y = Y/Z, x*y = T/Z


def add(one: Point, other: Point) -> Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % P
    b = (one[1] + one[0]) * (other[1] + other[0]) % P
    c, d = 2 * one[3] * other[3] * D % P, 2 * one[2] * other[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(number: int, point: Point) -> Point:
    found: Point = (0, 1, 1, 0)
    while number:
        if number & 1:
            found = add(found, point)
        point, number = add(point, point), number >> 1
    return found


def x_of(y: int, sign: int) -> int | None:
    """Returns the x of the point with this y and the lowest bit `sign`; None if there is none."""
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * ROOT % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    return P - x if x & 1 != sign else x


def encoded(point: Point) -> bytes:
    inverse = pow(point[2], P - 2, P)
    x, y = point[0] * inverse % P, point[1] * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


BASE_Y = 4 * pow(5, P - 2, P) % P
BASE_X = x_of(BASE_Y, 0) or 0
BASE: Point = (BASE_X, BASE_Y, 1, BASE_X * BASE_Y % P)


def verify(key: bytes, signature: bytes, message: bytes) -> bool:
    """Returns whether the signature over `message` is one by this public key."""
    number = int.from_bytes(key, "little")
    y, sign = number & (2**255 - 1), number >> 255
    if y >= P or y in (0, 1, P - 1):  # F11.3
        return False
    x, s = x_of(y, sign), int.from_bytes(signature[32:], "little")
    if x is None or s >= ORDER:
        return False
    k = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % ORDER
    # R = sB - kA, compared as bytes
    return encoded(add(times(s, BASE), times(ORDER - k, (x, y, 1, x * y % P)))) == signature[:32]
