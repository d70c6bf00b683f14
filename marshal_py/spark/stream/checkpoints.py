"""Whether a checkpoint folder belongs to the query that it is given to. Spark does not check it.

Spark hands the offsets in the folder to whatever source the query has now. Offsets of another source have another form.
Offsets of another coordination topic have the right form and no meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from marshal_py.errors import InvalidOption


def check_maker(
    offset: Mapping[str, Any], field: str, kind: type, committed: Mapping[str, Any], more: str = ""
) -> None:
    """Raises InvalidOption unless the offset has a `field` of type `kind`, as the source's. `committed`: where the
    query is, `more`: for the text."""
    if not isinstance(offset.get(field), kind):
        rule = f"the folder holds the checkpoint of another source: use a new folder{more}"
        raise InvalidOption("checkpointLocation", json.dumps(committed), rule)


def other_log(found: str, incarnation: bytes) -> str:
    """Returns what is wrong with a checkpoint of the incarnation `found`, in hex; "" if that is `incarnation`."""
    if found == incarnation.hex():
        return ""
    return "the checkpoint is from another coordination topic, or from before it was created again"
