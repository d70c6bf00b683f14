"""How much of a long search `make test` runs."""

from __future__ import annotations

from typing import Final

import pytest

# A test divides the number of its seeds, and what it asks them to show, by `part`. `make proof` runs all of them.
PARTLY: Final = pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.proof)])
