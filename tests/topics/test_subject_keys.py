"""`subject_key`: keys made of parts of a subject, the seed's partitioning wildcards."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from marshal_py import InvalidOption, subject_key


@pytest.mark.parametrize(
    ("pattern", "tokens", "subject", "key"),
    [
        ("orders.*.*", (2, 1), "orders.eu.42", b"42.eu"),
        ("orders.*.*", (2,), "orders.eu.42", b"42"),
        ("orders.*.*", [1, 2], b"orders.eu.42", b"eu.42"),
        ("foo.*.*.>", (1, 2), "foo.a.b.c.d", b"a.b"),
        ("*", (1,), bytearray(b"one"), b"one"),
        ("orders.*.*", (2, 1), b"orders.\xff.\xe4", b"\xe4.\xff"),
        ("*.fixed.*", (1, 2), "ä.fixed.*", "ä.*".encode()),
        (None, (3, 1), "orders.eu.42.paid", b"42.orders"),
    ],
)
def test_a_key_has_the_chosen_tokens_in_the_chosen_order(
    pattern: str | None, tokens: Any, subject: str | bytes, key: bytes
) -> None:
    """Partitioned consumer groups: "[1,2] if the key is composed of both * wildcards, [2] if ... only the second"."""
    made = subject_key(pattern, tokens=tokens)
    assert made(subject) == key
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("pattern", "subject"),
    [
        ("orders.*.*", "orders.eu"),
        ("orders.*.*", "orders.eu.42.paid"),
        ("orders.*.*", "refunds.eu.42"),
        ("orders.*.*", "orders..42"),
        ("orders.*.*", ""),
        ("foo.*.>", "foo.a"),
        ("foo.*.>", "foo.a."),
        (None, "one"),
        (None, 5),
        (None, None),
    ],
)
def test_a_subject_of_another_form_is_refused_by_name(pattern: str | None, subject: Any) -> None:
    """A key made of it would send the message to a partition where nobody looks for it."""
    key = subject_key(pattern, tokens=(1,) if pattern is not None else (2, 1))
    with pytest.raises(InvalidOption, match="subject") as refused:
        key(subject)
    assert refused.value.value == subject
    assert ("a text" if not isinstance(subject, str) else pattern or "at least 2 tokens") in str(refused.value)


@pytest.mark.parametrize("tokens", [(), (0,), (3,), (1, 1), (True,), ("1",), "12", None, 1, (1.0,)])
def test_wrong_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidOption, match=r"tokens=.*from 1 to 2, for the `\*` of 'orders"):
        subject_key("orders.*.*", tokens=tokens)


@pytest.mark.parametrize("pattern", ["", "orders..*", "orders.>.*", "orders.eu", ">", 5, b"*"])
def test_a_wrong_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(InvalidOption, match="pattern="):
        subject_key(pattern, tokens=(1,))
