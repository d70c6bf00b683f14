"""The file that a broken consumer saves: private, bounded; if it cannot be written, that is no error."""

from __future__ import annotations

import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from marshal_py.errors import Diverged, InvalidOption
from marshal_py.history import explain
from marshal_py.protocol.member.member import Member
from tests.support.differential_log import GROUP, TOPIC, DifferentialLog

ERROR = Diverged(GROUP, 0, 16, 1, 2, "planted")


def member_of(book: DifferentialLog) -> Member:
    options = SimpleNamespace(client_id="c")
    return cast(Member, SimpleNamespace(name=GROUP, world=book.world, group=book.group, session=1, options=options))


def test_the_file_holds_the_whole_state_for_its_owner_alone(tmp_path: Path) -> None:
    book = DifferentialLog()
    session, epoch = book.owner()
    path = Path(explain.save_state(member_of(book), ERROR, str(tmp_path), "lib 1", 5))
    found = explain.load_state(path, GROUP)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.parent == tmp_path
    assert (found["at_offset"], found["held"], found["by"], found["left_out"]) == (book.last, f"{1:016x}", "lib 1", 0)
    assert found["state"] == explain.plain_state(book.group, 100)
    assert found["state"]["partition t:0"]["epoch"] == epoch
    assert found["state"][f"session {session}"]["client_id"] == "c"


def test_a_great_state_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "BYTES_MAX", 3_000)
    book = DifferentialLog(exhaustive=False)
    session = book.join()
    book.topology(64)
    for number in range(64):
        book.claim(session, number)
    path = Path(explain.save_state(member_of(book), ERROR, str(tmp_path), "lib 1", 5))
    assert path.stat().st_size <= 3_001
    found = explain.load_state(path, GROUP)
    kept = [entry for entry in found["state"] if entry.startswith("partition")]
    assert 0 < len(kept) == 64 - found["left_out"]
    held, log = found["state"], explain.plain_state(book.group, 100)
    assert list(explain.differences(held, log, whole=False)) == []
    assert list(explain.differences(held, log)) != [], "what was left out would look like a difference"


def test_whatever_the_digest_covers_is_found_to_differ() -> None:
    """G3: else `marshal explain --state` would say that both are the same."""
    book = DifferentialLog()
    session, epoch = book.owner()
    held, group = explain.plain_state(book.group, 100), book.group
    group.deleted_at, group.topics[TOPIC].id = 3, "another"
    group.sessions[session].sequence, group.sessions[session].idle_ms = 7, 8
    group.claims[epoch].progress = b"x"
    found = [(one.entry, one.field) for one in explain.differences(held, explain.plain_state(group, 100))]
    assert found == [
        ("group", "deleted_at"),
        ("partition t:0", "progress"),
        (f"session {session}", "sequence"),
        (f"session {session}", "idle_ms"),
        (f"topic {TOPIC}", "id"),
    ]
    del held["group"]["deleted_at"]
    assert ("group", "deleted_at") not in [
        (one.entry, one.field) for one in explain.differences(held, explain.plain_state(group, 100))
    ], "a file of an older library has not said it"


def test_a_folder_that_cannot_be_written_to_costs_the_file_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = DifferentialLog()
    book.owner()
    assert explain.save_state(member_of(book), ERROR, str(tmp_path / "missing"), "lib 1", 5) == ""
    assert "could not be kept" in caplog.text


def test_a_group_of_any_name_makes_a_file_name(tmp_path: Path) -> None:
    book = DifferentialLog()
    book.owner()
    member = member_of(book)
    member.name = "../" + "\N{SNOWMAN}" * 200
    path = Path(explain.save_state(member, ERROR, str(tmp_path), "lib 1", 5))
    assert path.parent == tmp_path
    with pytest.raises(InvalidOption, match="it is of"):
        explain.load_state(path, GROUP)


def test_the_error_names_the_file_also_in_another_process() -> None:
    error = Diverged(GROUP, 0, 16, 1, 2, "planted")
    assert error.evidence == ""
    error.keep("/tmp/kept.json")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.evidence) == (str(error), "/tmp/kept.json")
    assert "marshal explain billing --state /tmp/kept.json" in str(again)
