"""What programs and scripts use stays: public names, parameters, commands, options, exit codes. They only grow.

`python -m tests.test_compatibility` writes tests/fixtures/public.json anew. Elsewhere: documents of --json
(tests/cli/test_documents.py), bytes (tests/protocol/test_codec.py), the fold (tests/cli/test_fold_4.py).
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marshal_py.admin.views import diagnosis
from marshal_py.cli import output
from marshal_py.cli.app import COMMANDS, load
from tests.support.command_line import invoke
from tests.test_exports import PUBLIC_MODULES, public_objects

KEPT = Path(__file__).parent / "fixtures" / "public.json"
HOW = (
    "programs use these: bring back what is gone, and let it warn for at least one minor release (CHANGELOG.md, What "
    "stays compatible). If you must break them, CHANGELOG.md says what to write instead. Before each release "
    "`python -m tests.test_compatibility` keeps what came up"
)
HOW_CODES = (
    "scripts branch on exit codes: give a new outcome its own code, and keep the old ones. If you must change one, "
    "do it in a major release; CHANGELOG.md and docs/command-line.md say what scripts do then"
)
Surface = dict[str, dict[str, list[str]]]


def options(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    """Yields each command below `name` with its options and arguments."""
    if hasattr(command, "commands"):
        for inner, found in command.commands.items():
            yield from options(f"{name} {inner}", found)
    else:
        yield (
            name,
            sorted(
                word
                for one in command.params
                for word in (
                    [*one.opts, *one.secondary_opts]
                    if one.param_type_name == "option"
                    else [str(one.metavar or one.name)]  # as new releases of typer call it
                )
            ),
        )


def surface() -> Surface:
    """Everything that is public: by module its names, by function its parameters, by command its options."""
    modules = {name: importlib.import_module(name) for name in PUBLIC_MODULES}
    names = {name: sorted(getattr(module, "__all__", ())) for name, module in modules.items()}
    names["marshal_py.errors"] = sorted(
        name for name, value in vars(modules["marshal_py.errors"]).items() if inspect.isclass(value) and name[0] != "_"
    )
    made = {name for words in names.values() for name in words} - {*names["marshal_py.errors"]}
    calls: dict[str, list[str]] = {}
    for home, one in public_objects(*PUBLIC_MODULES).items():
        inner = inspect.getmembers_static(one) if inspect.isclass(one) else [("", one)]  # also what is inherited
        for name, value in inner:
            function = getattr(value, "__func__", value)
            if not inspect.isfunction(function) or not function.__module__.startswith("marshal_py"):
                continue
            if name.startswith("_") and name != "__init__":
                continue
            if name != "__init__" or one.__name__ in made:  # other classes are only returned
                parameters = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
                short = f"{home.rpartition('.')[2]}.{name}" if name else home.rpartition(".")[2]
                calls[short] = sorted(parameters)
    commands = dict(found for name in COMMANDS for found in options(name, load(name)))
    return {"names": names, "calls": dict(sorted(calls.items())), "commands": dict(sorted(commands.items()))}


def losses(old: Surface, new: Surface) -> Iterator[str]:
    """Yields what a program that was written for the old surface would miss in the new one."""
    for kind, found in old.items():
        for name, words in found.items():
            now = new[kind].get(name)
            if now is None:
                yield f"{kind}: {name} is gone"
            else:
                yield from (f"{kind}: {name} has no {word}" for word in sorted({*words} - {*now}))


def test_what_is_public_only_grows() -> None:
    assert not list(losses(json.loads(KEPT.read_text(encoding="utf-8")), surface())), HOW


def test_what_is_gone_is_told() -> None:
    old: Surface = {"calls": {"connect": ["client_id", "timeout_s"]}, "commands": {"pause": [], "top": []}}
    new: Surface = {"calls": {"connect": ["client_id", "last_will"]}, "commands": {"pause": ["--for"]}}
    assert list(losses(old, new)) == ["calls: connect has no timeout_s", "commands: top is gone"]


@pytest.mark.parametrize("name", sorted(surface()["commands"]))
def test_a_command_line_that_cannot_be_read_has_a_code_of_its_own(name: str) -> None:
    expected = 3 if name == "check" else 2  # 2 of `check` is a group in trouble
    assert invoke([*name.split(), "--nonsense"]).exit_code == expected, HOW_CODES


def test_exit_codes_stay(tmp_path: Path) -> None:
    """Of each outcome. Signals and pipes end real commands in tests/cli/test_commands.py and test_audit.py."""
    missing = str(tmp_path / "missing")
    found = {
        "done": invoke(["schema", "state"]).exit_code,
        "failed": invoke(["state", "billing", "--dump", missing]).exit_code,
        "refused": invoke(["top"]).exit_code,
        "unknown to check": invoke(["check", "billing", "--dump", missing]).exit_code,
        "interrupted": output.INTERRUPTED,
        "its reader has gone": output.BROKEN_PIPE,
    }
    expected = {
        "done": 0,
        "failed": 1,
        "refused": 1,
        "unknown to check": 3,
        "interrupted": 130,
        "its reader has gone": 141,
    }
    assert found == expected, HOW_CODES
    assert diagnosis.EXIT_CODES == {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}, HOW_CODES


if __name__ == "__main__":
    KEPT.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
