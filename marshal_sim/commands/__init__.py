"""The commands `marshal simulate` and `marshal verify`, which marshal_py/cli/app.py names and imports when called."""

from typing import Final

DOORS: Final = ("exhaustive", "mutants", "simulate", "verify")
