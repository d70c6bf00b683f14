"""What users are told about a group: as a Struct, which always has each field, and as JSON, which has what there is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import POLICIES, GroupInfo, plain
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig
from tests.support.differential_log import DifferentialLog

PARTITIONED = {
    *("max_members", "member_list", "mappings"),
    *("member_states", "active_members", "missing_members", "unassigned"),
}
IN_SOME = {
    "": set(),
    "greedy": set(),
    "topic": set(),
    "balanced": {"lag_weighted"},
    "members": PARTITIONED,
    "blocks": PARTITIONED,
    "prioritized": {"priority_groups"},
    "pinned": {"priority_groups", "priority_timeout_s"},
    "overflow": {"priority_groups", "failover_s"},
}


def info(policy: str, **settings: Any) -> GroupInfo:
    book = DifferentialLog()
    book.must(GroupConfig(NONE, policy=policy, **settings))
    return overview.info(book.group, PauseHistory(book.group.name), 0, b"i" * 16, None)


def settings_of(policy: str) -> dict[str, Any]:
    if policy in ("members", "blocks"):
        return {"max_members": 1}
    return {"priority_groups": ("jobs",)} if "priority_groups" in IN_SOME[policy] else {}


@pytest.mark.parametrize("policy", IN_SOME)
def test_json_has_the_fields_of_the_policy(policy: str) -> None:
    """Also those that are empty, as most are in a group without consumers."""
    found = plain(info(policy, **settings_of(policy)))
    assert found.keys() & POLICIES.keys() == IN_SOME[policy]
    assert list(found) == [name for name in GroupInfo.__struct_fields__ if name in found], "in the order of the fields"
    assert found.keys() | POLICIES.keys() == set(GroupInfo.__struct_fields__)
    assert set().union(*IN_SOME.values()) == POLICIES.keys()


def test_what_a_policy_does_not_have_is_empty() -> None:
    found = info("greedy")
    assert [getattr(found, name) for name in POLICIES] == [None, None, None, (), (), (), (), (), None, None, False]


def test_an_entry_has_a_pin_if_somebody_is_pinned() -> None:
    """Its time may be unknown, when the record of the pin is in no log that is left."""
    found = info("pinned", priority_groups=("jobs",))
    (entry,) = found.priority_groups
    assert plain(found)["priority_groups"] == ({"name": "jobs"},)
    pinned = replace(found, priority_groups=(replace(entry, pinned_id="1-2"),))
    assert plain(pinned)["priority_groups"] == ({"name": "jobs", "pinned_id": "1-2", "pinned_ts": None},)
