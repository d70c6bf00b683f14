"""`python -m marshal_sim`, and `marshal verify`, which marshal_py/cli/app.py names and imports when called."""

from typing import Final

DOORS: Final = ("simulate", "verify")
