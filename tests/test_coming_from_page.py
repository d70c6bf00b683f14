"""docs/coming-from.md has a row for each method of aiokafka's consumer. tests/test_guides.py runs its programs."""

from __future__ import annotations

import re

from aiokafka import AIOKafkaConsumer

from tests.support.pages import page


def test_the_table_names_every_method_of_aiokafka() -> None:
    section = page("docs/coming-from.md").split("## aiokafka")[1].split("\n## ")[0]
    there = " ".join(row.split(" | ")[0] for row in section.splitlines() if row.startswith("| "))
    named = set(re.findall(r"\w+", there))
    assert {verb for verb in vars(AIOKafkaConsumer) if not verb.startswith("_")} - named == set()
