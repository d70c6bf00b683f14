"""Makes the pictures of README.md and docs/: `make pictures`. They show one run of `marshal demo`, whatever it was.

demo.svg has what the terminal showed at three moments, and timeline.png the page of `--html` in Chromium, which must be
installed. It writes into docs/pictures/.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from marshal_py.cli.demo import write_timeline
from marshal_py.cli.demo.process import Plan
from marshal_py.cli.demo.scenario import run_demo
from marshal_py.cli.demo.verdict import Totals, sentence
from marshal_py.cli.demo.view import View, picture
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport

FOLDER: Final = Path(__file__).parent / "pictures"
COLUMNS: Final = 106
MOMENTS: Final = ("killed by SIGKILL", "a fourth consumer joins", "the producer has stopped")  # drawn before each line
SIZE: Final = "1100,560"


class Recorder(View):
    """Keeps lines, and before some of them who owned what."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=COLUMNS))
        self.kept: list[Text] = []
        self._last = Text()

    def say(self, text: str) -> None:
        if any(moment in text for moment in MOMENTS):
            self.kept += [Text(), self._last, Text()]
        if not text.startswith("produced"):
            self.kept.append(Text(f"{self.seconds():5.1f} s  {text}"))

    def draw(self, totals: Totals) -> None:
        self._last = picture(totals)


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
        admin, view = KafkaTransport(settings, 10.0).admin(), Recorder()
        result, totals = run_demo(plan, admin, view)
        admin.close()
        page = Path(folder, "timeline.html")
        write_timeline(plan, 10.0, page)
        chromium = shutil.which("chromium") or "chromium"
        picture_options = [f"--window-size={SIZE}", "--hide-scrollbars", f"--screenshot={FOLDER / 'timeline.png'}"]
        subprocess.run([chromium, "--headless", "--no-sandbox", *picture_options, page.as_uri()], check=True)
    console = Console(file=io.StringIO(), record=True, width=COLUMNS)
    for text in [*view.kept, Text(), Text(sentence(result, totals.unsound), style="bold")]:
        console.print(text)
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="make demo"), flags=re.DOTALL)  # loads nothing
    (FOLDER / "demo.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
