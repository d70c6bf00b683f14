"""What users are told about a group: a Struct, which always has each field."""

from __future__ import annotations

from typing import Any

from marshal_py.admin.views import overview
from marshal_py.admin.views.group_info import GroupInfo
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig
from tests.support.differential_log import DifferentialLog

OF_POLICIES = (
    *("max_members", "member_list", "mappings", "member_states", "active_members", "missing_members", "unassigned"),
    *("priority_groups", "priority_timeout_s", "failover_s", "lag_weighted"),
)


def info(policy: str, **settings: Any) -> GroupInfo:
    book = DifferentialLog()
    book.must(GroupConfig(NONE, policy=policy, **settings))
    return overview.info(book.group, PauseHistory(book.group.name), 0, b"i" * 16, None)


def test_what_a_policy_does_not_have_is_empty() -> None:
    found = info("greedy")
    assert [getattr(found, name) for name in OF_POLICIES] == [None, None, None, (), (), (), (), (), None, None, False]
    (entry,) = info("pinned", priority_groups=("jobs",)).priority_groups
    assert (entry.name, entry.pinned_id, entry.pinned_ts) == ("jobs", None, None)
