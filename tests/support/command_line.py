"""`marshal` in this process: typer's runner, with the commands built once.

typer builds every command and its options anew for each call, which takes a hundred times as long as a short command.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

from typer.main import get_command
from typer.testing import CliRunner, Result

from marshal_py.cli.app import app
from marshal_sim.__main__ import app as proof
from tests.support.documents import check_printed


@functools.cache
def _command() -> Any:
    return get_command(app)


def invoke(arguments: Sequence[str], **options: Any) -> Result:
    """Runs one command to its end, and compares what --json prints with its schema. `options` are those of
    typer.testing.CliRunner.invoke."""
    with mock.patch("typer.testing._get_command", return_value=_command()):
        result = CliRunner().invoke(app, arguments, **options)
    if result.exception is None or isinstance(result.exception, SystemExit):
        check_printed(arguments, result.stdout, result.stderr, result.exit_code)
    return result


def simulate(*arguments: str) -> Result:
    """Runs a command of `marshal simulate`, or one of `python -m marshal_sim`."""
    if arguments and arguments[0] in ("mutants", "exhaustive"):
        return CliRunner().invoke(proof, arguments)
    return invoke(["simulate", *arguments])
