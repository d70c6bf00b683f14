"""The page of a timeline: whole, self-contained, and safe whatever names a log has. Nobody looks at it here."""

from __future__ import annotations

from html.parser import HTMLParser

from marshal_py.history.picture import Picture, PictureReader, page
from marshal_py.protocol.fold.world import World
from tests.support.differential_log import GROUP, DifferentialLog
from tests.support.timeline_page import data_in

PLANTED = "</script><script>alert('a')</script><!-- @@ \u2028 &amp; <b>"


class Reader(HTMLParser):
    """Collects what a browser would run, show or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.foreign: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.foreign += [name for name, _ in attrs if name in ("src", "href")]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def picture_of(client: str) -> Picture:
    book = DifferentialLog()
    book.join(client)
    book.topology()
    reader = PictureReader(World(), GROUP, 0, 10_000)
    for offset, value in enumerate(book.values):
        reader.read(offset, 1_000 * offset, value)
    return reader.finish()


def test_names_of_a_log_stay_text() -> None:
    text = page(PLANTED, [picture_of(PLANTED)], [PLANTED])
    reader = Reader(text)
    assert reader.open == []
    assert reader.foreign == []
    assert (reader.tags.count("script"), reader.tags.count("b")) == (2, 0)
    assert "link" not in reader.tags
    assert reader.texts["title"] == [PLANTED]
    data, program = reader.texts["script"]
    assert "<" not in data
    found = data_in(text)
    assert (found["title"], found["notes"]) == (PLANTED, [PLANTED])
    (picture,) = found["pictures"]
    assert picture["owners"][0][0] == PLANTED
    assert PLANTED in "".join(next(form[2] for form in picture["forms"] if form[0] == "Join"))
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "import("):
        assert way not in program, "what a log says is shown as text, and nothing is loaded"
