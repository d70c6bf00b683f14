"""Errors reach another process unchanged; their texts do not grow without end."""

from __future__ import annotations

import pickle

import pytest

from marshal_py.errors import GroupOpaque, InvalidOption, MarshalError, ModeMismatch, SessionCloned, first_of


@pytest.mark.parametrize(
    "error",
    [
        SessionCloned("billing", "c", 4, 17),
        ModeMismatch("billing", "at least once", "at most once"),
        GroupOpaque("billing", 9),
        InvalidOption("to", 5, "at least 6"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_pickle(error: MarshalError) -> None:
    """A worker of multiprocessing or Spark raises it, and the process that waits reads its fields."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_option_that_is_missing_is_not_said_to_have_been_given() -> None:
    assert str(InvalidOption("member", None, "name one", given=False)) == "no member given: name one"
    assert str(InvalidOption("timeout_s", None, "a number")) == "timeout_s=None is not allowed: a number"


def test_a_text_names_the_first_and_counts_the_others() -> None:
    assert [first_of("abcd"[:count], 2) for count in range(4)] == ["", "a", "a, b", "a, b and 1 more"]
    assert first_of(iter("abcd"), 2, " ") == "a b and 2 more"
