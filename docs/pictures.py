"""Makes the pictures of README.md and docs/: `make pictures`. They show one run of `marshal demo`, whatever it was.

demo.svg has what the terminal showed at three moments, top.svg what `marshal top` showed after the kill, timeline.png
the page of `--html` in Chromium, which must be installed. It writes into docs/pictures/.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from marshal_py.cli.demo import write_timeline
from marshal_py.cli.demo.scenario import View, picture, run_demo
from marshal_py.cli.demo.verdict import Totals, sentence
from marshal_py.cli.demo.worker import Plan
from marshal_py.cli.top.picture import Frame, Rows, Screen, Size, draw
from marshal_py.cli.top.source import Source
from marshal_py.log.observer import Observer
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport

FOLDER: Final = Path(__file__).parent / "pictures"
COLUMNS: Final = 106
MOMENTS: Final = ("killed by SIGKILL", "a fourth consumer joins", "the producer has stopped")  # drawn before each line
SIZE: Final = "1100,560"
TOP_SIZE: Final = Size(COLUMNS, 18)
LATE_S: Final = 3.0  # without a sign of life; after 4 s the others take over


class Recorder(View):
    """Keeps lines, and before some of them who owned what; and what `top` shows while a consumer is missed."""

    def __init__(self, source: Source) -> None:
        super().__init__(Console(file=io.StringIO(), width=COLUMNS))
        self.kept: list[Text] = []
        self.top: list[Text] = []
        self._last, self._source, self._killed = Text(), source, False

    def say(self, text: str) -> None:
        if any(moment in text for moment in MOMENTS):
            self.kept += [Text(), self._last, Text()]
            self._killed = True
        if not text.startswith("produced"):
            self.kept.append(Text(f"{self.seconds():5.1f} s  {text}"))

    def draw(self, totals: Totals) -> None:
        self._last = picture(totals)
        if self._killed and not self.top:
            seen = self._source.look()
            if any((member.last_sign_s or 0) > LATE_S for member in seen.members):
                screen, shown = Screen(view="group", group="demo"), Rows(seen.groups, seen.members)
                self.top = draw(screen, shown, Frame(seen.as_of_ms), TOP_SIZE)


def write_svg(name: str, title: str, lines: Iterable[Text]) -> None:
    """Writes lines of a terminal as a picture that loads nothing."""
    console = Console(file=io.StringIO(), record=True, width=COLUMNS)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)
    (FOLDER / name).write_text(svg, encoding="utf-8")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with Broker(topics={"demo-orders": 12, "__marshal": 16}) as broker, tempfile.TemporaryDirectory() as folder:
        settings = {"bootstrap.servers": broker.bootstrap_servers}
        plan = Plan(
            settings=settings,
            topic="demo-orders",
            group="demo",
            coordination_topic="__marshal",
            delivery="at_least_once",
            seconds=20.0,
            last_will=False,
        )
        source = Source(lambda: Observer(KafkaTransport(settings, 10.0), "__marshal"), "demo", None)
        admin, view = KafkaTransport(settings, 10.0).admin(), Recorder(source)
        result = run_demo(plan, admin, view)
        admin.close()
        page = Path(folder, "timeline.html")
        write_timeline(plan, 10.0, page)
        chromium = shutil.which("chromium") or "chromium"
        picture_options = [f"--window-size={SIZE}", "--hide-scrollbars", f"--screenshot={FOLDER / 'timeline.png'}"]
        subprocess.run([chromium, "--headless", "--no-sandbox", *picture_options, page.as_uri()], check=True)
    write_svg("demo.svg", "make demo", [*view.kept, Text(), Text(sentence(result), style="bold")])
    write_svg("top.svg", "marshal top demo", view.top)


if __name__ == "__main__":
    main()
