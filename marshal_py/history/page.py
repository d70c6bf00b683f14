"""Puts pictures into a page: one file of HTML that loads nothing. Pure; timeline.html beside it draws them.

Client ids, reasons and topics are anybody's text: they reach the page compressed and in base64, where no tag can be,
and the page shows them as text alone.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final
from zlib import compress

import msgspec

from marshal_py.history.picture import Picture

TEMPLATE: Final = "timeline.html"


def page(title: str, pictures: Sequence[Picture], notes: Sequence[str] = ()) -> str:
    """Returns the page. `pictures`: of one group each, of which it shows one at a time. `notes`: paragraphs below."""
    data = b64encode(compress(msgspec.json.encode({"title": title, "notes": notes, "pictures": pictures}))).decode()
    before, between, after = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8").split("@@")
    return f"{before}{escape(title)}{between}{data}{after}"
