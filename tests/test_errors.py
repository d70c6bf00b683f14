"""Errors reach another process unchanged."""

from __future__ import annotations

import pickle

import pytest

from marshal_py.errors import GroupOpaque, InvalidOption, MarshalError, ModeMismatch, SessionCloned


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
