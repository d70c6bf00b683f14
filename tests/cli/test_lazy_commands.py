"""`marshal --help` imports no command: it shows a line of each, which agrees with the command's own help."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from marshal_py.cli.app import COMMANDS, app, load

LISTED = """
import sys
sys.argv[1:] = {arguments!r}
from marshal_py.cli import main
try:
    main()
except SystemExit:
    pass
print(*sorted(name for name in sys.modules if name.startswith("marshal_py.cli.")), sep=" ", file=sys.stderr)
print(*(name in sys.modules for name in ("confluent_kafka", "rich", "marshal_py.client.consumer")), file=sys.stderr)
"""


def imported(*arguments: str) -> list[str]:
    program = LISTED.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    assert COMMANDS[name].help == load(name).get_short_help_str(1_000)


def test_the_help_imports_no_command() -> None:
    assert imported("--help") == ["marshal_py.cli.app", "False False False"]


def test_a_command_imports_no_other() -> None:
    modules, _ = imported("pause", "--help")
    assert "marshal_py.cli.pause" in modules.split()
    assert {"marshal_py.cli.state", "marshal_py.cli.get"}.isdisjoint(modules.split())


def test_the_exporter_does_without_the_client() -> None:
    """It runs all the time, so its memory counts."""
    assert imported("exporter", "--help")[1] == "True False False"


def test_the_help_fits_a_terminal_and_shows_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    lines = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert max(map(len, lines)) <= 80


def test_who_types_no_command_learns_what_to_type_first() -> None:
    shown = CliRunner().invoke(app, [])
    assert "Type first:\n    marshal demo " in shown.output
    assert CliRunner().invoke(app, ["-h"]).stdout.strip() == shown.output.strip()
    assert CliRunner().invoke(app, ["log", "tail", "-h"]).stdout.startswith("Usage: marshal log tail")


def test_a_word_that_is_no_command_names_the_nearest() -> None:
    done = CliRunner().invoke(app, ["stae"])
    assert done.exit_code == 2
    assert "Did you mean 'state'?" in done.output
