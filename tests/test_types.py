"""How much of the package has types that every checker agrees on, by pyright, as editors use it.

    .venv/bin/python -m pyright --verifytypes marshal_py --ignoreexternal

The environment must be active, or pyright does not find what the package imports. The pip package brings pyright and
its own node, so nothing is downloaded here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
KNOWN_MIN: Final = 0.98  # of all names that a program could import, their parameters and attributes


@pytest.mark.proof
def test_the_types_of_nearly_all_names_are_known() -> None:
    python = Path(sys.executable)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",
        "VIRTUAL_ENV": str(python.parent.parent),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",  # otherwise it looks for a newer release of itself
    }
    command = [sys.executable, "-m", "pyright", "--verifytypes", "marshal_py", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["typeCompleteness"]
    unknown = [symbol["name"] for symbol in found["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    assert found["completenessScore"] >= KNOWN_MIN, unknown
    assert len(found["symbols"]) > 5_000, "it has found the package"
