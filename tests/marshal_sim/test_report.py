"""The page of a run: whole, self-contained, with a bar for every claim that the log holds."""

from __future__ import annotations

from html.parser import HTMLParser

from marshal_sim.judge.auditor import judge
from marshal_sim.tools import sweep
from marshal_sim.tools.report import page, takeover_times


def seed_with_takeovers_and_faults() -> int:
    return next(seed for seed in range(100) if (ran := sweep.run_one(seed)).takeovers > 1 and ran.faults)


class Reader(HTMLParser):
    """Counts tags, and what would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.foreign: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.foreign += [name for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_shows_every_session_claim_and_fault() -> None:
    result, moments, logs = sweep.trace_seed(seed_with_takeovers_and_faults())
    times = takeover_times(logs, result.scenario.interval_ms)
    assert len(times) == result.takeovers
    assert all(time > 0 for time in times)
    text = page(result, moments, logs, "marshal simulate run --seed <N>", times, "this run")
    reader = Reader(text)
    assert reader.open == []
    assert reader.foreign == []
    assert "link" not in reader.tags
    assert "script" not in reader.tags
    histories = [judge(log).history for log in logs]
    bars = sum(len(history.sessions) + sum(map(len, history.by_key.values())) for history in histories)
    assert reader.tags.count("rect") >= bars > 0
    faults = [moment for moment in moments if moment.what == "fault"]
    assert reader.tags.count("line") == len(faults) + sum(found.ms >= 0 for found in result.violations) > 0
    assert "--seed &lt;N&gt;" in text
