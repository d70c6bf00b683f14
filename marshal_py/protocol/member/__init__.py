"""The decisions of one consumer: what it claims, releases and writes, as values that a driver carries out."""

from typing import Final

DOORS: Final = (
    "advisory",
    "candidacy",
    "falling_behind",
    "grant_requests",
    "group_settings",
    "later_topics",
    "member",
    "overflow",
    "ready",
    "rebalance",
    "record_handler",
    "refusals",
    "releases",
    "shared_client_ids",
    "waiting",
)
