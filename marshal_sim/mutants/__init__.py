"""Planted bugs that the judge must find."""

from typing import Final

DOORS: Final = ("mutants",)
