"""Errors are one tree; their texts are built from their fields, reach another process unchanged, and do not grow."""

from __future__ import annotations

import inspect
import itertools
import pickle
import re
from typing import Any, get_type_hints

import pytest

from marshal_py import errors
from marshal_py.errors import (
    ClusterError,
    DeserializationFailed,
    Diverged,
    GroupOpaque,
    InvalidOption,
    MarshalError,
    ModeMismatch,
    SessionCloned,
    first_of,
)

CLASSES = {name: one for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, MarshalError)}
VALUES: dict[Any, tuple[Any, ...]] = {
    str: ("billing", ""),
    int: (7,),
    float: (2.5, 0.0, -1.0),
    bool: (False, True),
    object: (3,),
    tuple[str, ...]: (("a", "b"), ()),
    tuple[str, ...] | None: (None, ("a",)),
}
CHOICES: dict[str, tuple[str, ...]] = {  # fields that choose a text
    "outcome": tuple(errors.FAILED),
    "busy": tuple(errors.BUSY),
    "reason": (*errors.PARKED, "of a newer library"),
}


def tree() -> dict[str, str]:
    """The parent of each class in the tree at the top of errors.py: branches, below each the names of its leaves."""
    parents, above = {}, {0: "MarshalError"}
    depth = 0
    for line in (errors.__doc__ or "").splitlines():
        branch, plus, rest = line.partition("+-- ")
        if plus:
            depth = len(branch) // 10
            above[depth + 1] = rest.partition(":")[0]
            parents[above[depth + 1]] = above[depth]
        elif re.fullmatch(r"[ |]{10,}[A-Z]\w+(, \w+)*,?", line):
            parents |= dict.fromkeys(re.findall(r"\w+", line), above[depth + 1])
    return parents


def test_the_tree_at_the_top_is_the_tree() -> None:
    assert tree() == {name: one.__mro__[1].__name__ for name, one in CLASSES.items() if one is not MarshalError}


@pytest.mark.parametrize("name", [name for name, one in CLASSES.items() if one.__signature__])
def test_a_text_is_built_from_the_fields(name: str) -> None:
    """Every combination of values has a text, in which no field is left open."""
    hints, fields = get_type_hints(CLASSES[name]), list(inspect.signature(CLASSES[name]).parameters)
    choices = [CHOICES.get(field, VALUES.get(hints[field], ({"t:0": ("a", "b")},))) for field in fields]
    for values in itertools.product(*choices):
        error = CLASSES[name](*values)
        assert [getattr(error, field) for field in fields] == list(values)
        assert error.args == (error.sentence(),)
        assert "{" not in str(error)


def test_a_constructor_takes_its_fields_and_nothing_else() -> None:
    """The type checker knows them too: tests/typing, and `make lint`."""
    assert vars(GroupOpaque("billing", offset=9)) == {"group": "billing", "offset": 9}
    for wrong in (lambda: GroupOpaque("billing"), lambda: GroupOpaque("billing", 9, 3), lambda: GroupOpaque(log=3)):  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            wrong()


def test_a_class_without_fields_takes_its_text() -> None:
    """The roots, and errors that a part of the library derives from them for itself."""

    class OwnError(MarshalError):
        pass

    for kind in (ClusterError, OwnError):
        error = kind("a step failed")
        assert (str(error), error.args) == ("a step failed", ("a step failed",))
        assert pickle.loads(pickle.dumps(ClusterError("x"))).args == ("x",)


def test_a_default_of_a_field_need_not_be_given() -> None:
    assert InvalidOption("to", 5, "at least 6").given
    assert str(DeserializationFailed("t", 0, 3, "key", "no UTF-8")).startswith("the key of t:0@3 cannot be")


def test_what_is_noted_later_is_in_the_text() -> None:
    error = Diverged("billing", 0, 5, 1, 2, "bits")
    error.keep("state.bin")
    assert str(error).endswith("restart the process; its state is saved: `marshal explain billing --state state.bin`")


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


def test_a_position_that_is_not_there_says_that_a_number_is_an_offset() -> None:
    """Somebody wrote until="1600518400000" and meant a time in milliseconds."""
    said = str(errors.PositionOutOfRange("orders", 0, 1_600_518_400_000, 0, 9))
    assert "valid are 0 to 9; a plain number is an offset, a time is written as 2025-01-31T12:00:00Z" in said
