"""`marshal keys`, --admin-key, and --sign-with of the commands that change a group."""

from __future__ import annotations

from pathlib import Path

from marshal_py import connect
from tests.cli.shell import Shell

GROUP = "keyed"


def test_keys_from_the_first_to_the_last(shell: Shell, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one.key"), str(tmp_path / "two.key")
    made = shell.json("keys", one, "--generate")
    first, second = made["public"], shell.run("keys", two, "--generate").stdout.strip()
    assert made["file"] == one
    assert shell.run("keys", two, "--generate").exit_code == 1, "a key is never replaced"
    assert shell.run("keys", two).stdout.strip() == second
    assert "--generate" in shell.run("keys", str(tmp_path / "none.key")).stderr
    with connect({"bootstrap.servers": shell.servers, "log_level": 0}) as marshal:
        marshal.create_group(GROUP)
    update = ("groups", "update", GROUP, "--yes", "--admin-key")
    assert f"admin_keys: None -> {first}" in shell.run(*update, first, "--dry-run").stdout
    assert shell.json(*update, first)["changed"] == {"admin_keys": [first]}
    assert f"admin keys: {first}" in shell.run("state", GROUP, "--settings").stdout
    refused = shell.run("pause", GROUP, "--yes")
    assert refused.exit_code == 1
    assert "--sign-with FILE" in refused.stderr
    assert shell.run("pause", GROUP, "--yes", "--dry-run").exit_code == 0, "a rehearsal needs no key"
    assert shell.run("pause", GROUP, "--yes", "--sign-with", one).exit_code == 0
    assert shell.run("resume", GROUP, "--take-over", "--sign-with", two).exit_code == 1
    assert shell.run("resume", GROUP, "--sign-with", one).exit_code == 0
    assert shell.run(*update, second, "--sign-with", one).exit_code == 0
    assert shell.json("state", GROUP, "--settings")["admin_keys"] == [second]
    assert shell.run(*update, "none", "--sign-with", one).exit_code == 1
    assert shell.run(*update, "none", "--sign-with", two).exit_code == 0
    assert shell.run("pause", GROUP, "--yes").exit_code == 0
    assert shell.run(*update, "ab").exit_code == 1
