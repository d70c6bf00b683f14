"""What a page of `marshal timeline` has to draw, for tests that look into it without a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any


def data_in(text: str) -> Any:
    """The title, the notes and the pictures of a page."""
    found = re.search(r'id="data">([^<]*)</script>', text)
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def picture_in(text: str) -> Any:
    """The only picture of a page."""
    (picture,) = data_in(text)["pictures"]
    return picture
