"""The decisions of one consumer: what it claims, releases and writes, as values that a driver carries out."""

from typing import Final

DOORS: Final = ("advisory", "candidacy", "group_settings", "member", "member_state", "rebalance", "waiting")
