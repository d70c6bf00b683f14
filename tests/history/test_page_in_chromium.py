"""The page of a timeline in Chromium: what it draws, what a click, a key and the search give, and its size.

`make proof` needs Debian's package chromium, or another Chromium that is called so; without one these tests fail.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from marshal_py.history.picture import Picture, PictureReader, page
from marshal_py.protocol.fold.world import World
from tests.support.busy_group import GROUP, BusyGroup, busy_group

pytestmark = pytest.mark.proof

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 120
BYTES_MAX = 1_000_000
# What the scripts below use: the colour of a lane at a time, a click there, a key.
HELP = """
lanes.setPointerCapture = () => {};
const middle = lane => AXIS + RAIL + (lane + .5) * row();
const pixel = (lane, ms) => {
  const found = lanes.getContext("2d").getImageData(xOf(ms), middle(lane) + 4, 1, 1).data;
  return [...found].slice(0, 3);
};
const clickAt = (lane, ms) => {
  const box = lanes.getBoundingClientRect();
  const place = { clientX: box.left + xOf(ms), clientY: box.top + middle(lane), pointerId: 1 };
  for (const type of ["pointerdown", "pointerup"]) lanes.dispatchEvent(new PointerEvent(type, place));
};
const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const seek = text => {
  $("search").value = text;
  $("search").dispatchEvent(new Event("input"));
  return [...$("hits").children].map(one => one.textContent);
};
const hue = who => [1, 3, 5].map(at => parseInt(HUES[pic.owners[who][6] % HUES.length].slice(at, at + 2), 16));
"""


def picture_of(group: BusyGroup) -> Picture:
    reader = PictureReader(World(), GROUP, 0, group.now_ms)
    for record in group.records:
        reader.read(record.offset, record.timestamp_ms, record.value)
    return reader.finish()


def told(text: str, script: str, folder: Path, *options: str) -> Any:
    """Opens the page in Chromium and returns what `script`, the body of a function in the page, returns."""
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    assert chromium is not None, "no Chromium is installed: apt-get install chromium"
    path = folder / "page.html"
    ends = (
        f"<script>{HELP}\nready.then(() => {{ {script} }}).catch(error => ({{ error: String(error) }})).then("
        'result => document.body.append(element("pre", JSON.stringify(result), { id: "result" })));</script></body>'
    )
    path.write_text(text.replace("</body>", ends), encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1280,800", "--virtual-time-budget=2000", "--dump-dom", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return json.loads(unescape(found[1]))


def test_owners_gaps_and_pauses_are_drawn_and_tell_their_records(tmp_path: Path) -> None:
    group = BusyGroup(partitions=6, members=3)
    group.heartbeats(60)
    dead = group.crash()
    group.heartbeats(60)
    group.rewind()
    group.heartbeats(60)
    picture = picture_of(group)
    taken = next(span for span in picture.spans if span.owner > 0 and span.lane == 0)
    paused = next(span for span in picture.spans if span.owner == -2 and span.lane == 0)
    gap = next(span for span in picture.spans if span.owner == -1 and span.lane == 0 and span.to_ms == taken.from_ms)
    assert None not in (taken.from_ms, taken.to_ms, paused.from_ms, paused.to_ms, gap.from_ms)
    found = told(
        page("t", [picture]),
        f"""
        const out = {{ owned: [pixel(0, ({taken.from_ms} + {taken.to_ms}) / 2), hue({taken.owner})] }};
        zoomTo({gap.from_ms} - 100, {taken.from_ms} + 100); draw();
        out.gap = pixel(0, ({gap.from_ms} + {taken.from_ms}) / 2);
        zoomTo({paused.from_ms}, {paused.to_ms}); draw();
        out.pause = pixel(0, ({paused.from_ms} + {paused.to_ms}) / 2);
        zoomTo(0, pic.to_ms); draw();
        clickAt(0, ({taken.from_ms} + {taken.to_ms}) / 2);
        out.click = $("detail").textContent;
        press("p"); out.back = $("detail").querySelector("h2").textContent;
        press("n"); press("n"); out.next = $("detail").querySelector("h2").textContent;
        out.session = seek("{dead}"); out.partition = seek("orders:3"); out.offset = seek("{taken.from_offset}");
        out.client = seek("worker-1"); $("hits").firstChild.click(); out.alone = owner;
        press("Escape"); out.all = owner;
        press("+"); out.zoomed = (to - from) / pic.to_ms; press("0"); out.whole = (to - from) / pic.to_ms;
        out.legend = $("legend").textContent; out.marks = $("marks").textContent;
        out.before = root.dataset.theme; press("t"); out.after = root.dataset.theme;
        return out;
        """,
        tmp_path,
        "--blink-settings=preferredColorScheme=1",
    )
    assert "error" not in found, found["error"]
    assert found["owned"][0] == found["owned"][1]
    assert found["gap"][0] > found["gap"][1] + 20 == found["gap"][2] + 20, "red"
    assert max(found["pause"]) - min(found["pause"]) < 20, "grey"
    assert max(found["pause"]) < 240
    client = picture.owners[taken.owner].client
    assert f"orders:0: {client} (session {picture.owners[taken.owner].session})" in found["click"]
    assert f"begins: session {picture.owners[taken.owner].session} claims orders:0" in found["click"]
    assert f"offset {taken.from_offset}," in found["click"]
    assert "The log around then" in found["click"]
    assert found["back"] != found["next"] != found["click"]
    assert found["session"][:2] == [
        f"offset {dead}: worker-0.example.org-0 joins, at least once, for orders",
        f"worker-0.example.org-0, session {dead}",
    ]
    assert found["partition"] == ["orders:3"]
    assert found["offset"][0].startswith(f"offset {taken.from_offset}: session")
    assert (found["alone"], found["all"]) == (picture.owners[1].client, None)
    assert found["zoomed"] < 1 == found["whole"]
    assert all(owner.client in found["legend"] for owner in picture.owners)
    for words in ("nobody owns it", "paused", "is evicted", "position moves back", "what owners wrote"):
        assert words in found["marks"]
    assert (found["before"], found["after"]) == ("light", "dark")


def test_names_of_a_log_run_nothing(tmp_path: Path) -> None:
    planted = '</script><script>document.title="taken over"</script><img src=x onerror="document.title=1">'
    group = BusyGroup(partitions=2, members=1)
    group.join(planted)
    found = told(
        page(planted, [picture_of(group)], [planted]),
        'press("j"); press("j"); seek("script");\n'
        'return [document.title, $("legend").textContent, document.images.length, $("hits").textContent];',
        tmp_path,
    )
    assert found[0] == planted
    assert planted in found[1]
    assert found[2] == 0
    assert planted in found[3]


def test_a_page_of_100_000_records(tmp_path: Path) -> None:
    log = list(busy_group(100_000))
    reader = PictureReader(World(), GROUP, 0, log[-1].timestamp_ms)
    for record in log:
        reader.read(record.offset, record.timestamp_ms, record.value)
    text = page("t", [reader.finish()])
    assert len(text.encode()) <= BYTES_MAX
    last = log[-1].offset
    assert told(text, "return [times.length, spans.length, offsets.at(-1)];", tmp_path) == [len(log) - 1, 100, last]
