"""docs/asyncio.md names every verb. tests/test_guides.py runs its programs."""

from __future__ import annotations

from marshal_py import aio
from tests.support.pages import page


def test_the_table_names_every_verb_of_the_front() -> None:
    table = page("docs/asyncio.md").split("## Which front can do what")[1]
    verbs = {name for kind in (aio.AsyncConsumer, aio.AsyncTopic) for name in vars(kind) if not name.startswith("_")}
    said = {"group", "client_id", "closed", "stopping", "name", "close", "get_page", "groups", "delete_group"}
    said |= {"key_index", "update_index", "index_status"}  # "indexes"
    assert {verb for verb in verbs - said if verb not in table} == set()
