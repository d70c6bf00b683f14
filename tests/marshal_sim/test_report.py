"""The page of a run: the timeline of each group with every claim, session and fault, and the run in words."""

from __future__ import annotations

from marshal_sim.judge.auditor import judge
from marshal_sim.tools import sweep
from marshal_sim.tools.report import page, takeover_times
from tests.support.timeline_page import data_in


def seed_with_takeovers_and_faults() -> int:
    return next(seed for seed in range(100) if (ran := sweep.run_one(seed)).takeovers > 1 and ran.faults)


def test_the_page_shows_every_session_claim_and_fault() -> None:
    result, moments, logs = sweep.trace_seed(seed_with_takeovers_and_faults())
    times = takeover_times(logs, result.scenario.interval_ms)
    assert len(times) == result.takeovers
    assert all(time > 0 for time in times)
    text = page(result, moments, logs, "marshal simulate --seed <N>", times, "this run")
    found = data_in(text)
    claims, sessions, drawn = set(), set(), set()
    for history in (judge(log).history for log in logs):
        sessions |= set(history.sessions)
        claims |= {(key[0], claim.epoch) for key, of_key in history.by_key.items() for claim in of_key}
    faults = [moment for moment in moments if moment.what == "fault"]
    assert faults
    for picture in found["pictures"]:
        assert picture["clock"] == "run"
        drawn |= {(picture["group"], span[4]) for span in picture["spans"] if span[1] >= 0}
        assert {one[1] for one in picture["owners"]} == {
            session for group, session in sessions if group == picture["group"]
        }
        assert [mark[4] for mark in picture["marks"] if mark[1] == "fault"] == [fault.text for fault in faults]
    assert drawn == claims
    assert found["notes"][0] == "Again: marshal simulate --seed <N>"
    assert f"{result.takeovers} take-overs" in found["notes"][-2]
    assert found["notes"][-1].startswith("Take-overs of this run, from")
    assert f"in intervals: {len(times)} in all; " in found["notes"][-1]
