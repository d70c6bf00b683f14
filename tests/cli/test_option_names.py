"""Errors name options as a command line gives them, and leave commands that they advise as they are."""

from __future__ import annotations

import pytest

from marshal_py.cli.output import _with_options
from marshal_py.transport.topic_checks import wrong_settings

OPTIONS = {"policy": "--policy", "max_bytes": "--max-bytes", "isolation": "--isolation", "ms": "--ms"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_bytes=0: 1 or more", "--max-bytes 0: 1 or more"),
        ("the policy=balanced moves (policy=greedy)", "the --policy balanced moves (--policy greedy)"),
        ("its cleanup.policy=delete,retention.ms=-1", "its cleanup.policy=delete,retention.ms=-1"),
        ("the file /tmp/policy=1", "the file /tmp/policy=1"),
    ],
)
def test_only_arguments_become_options(text: str, shown: str) -> None:
    assert _with_options(text, OPTIONS) == shown


@pytest.mark.parametrize("brokers", [1, 3])
def test_the_command_that_corrects_a_topic_can_be_copied(brokers: int) -> None:
    found = {"cleanup.policy": "compact", "retention.ms": "1000", "min.insync.replicas": "1"}
    for error in wrong_settings("__marshal", found, brokers, 1, "broker:9092"):
        assert _with_options(str(error), OPTIONS) == str(error)
