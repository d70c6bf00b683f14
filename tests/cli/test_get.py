"""`marshal get`: the questions of ADR-31 from the shell, on the embedded broker."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from marshal_py.cli.get import show_message
from marshal_py.topics.request import StoredMessage
from marshal_py.transport.embedded import Broker
from tests.cli.shell import DEADLINE_S, Shell
from tests.support import direct_get_examples
from tests.support.direct_get_examples import Example

TOPIC = "get-users"


@pytest.fixture(scope="module")
def users(shell: Shell, broker: Broker) -> Shell:
    lines = [
        ("1234.name", "Bob"),
        ("1234.surname", "Smith"),
        ("1234.address", "1 Main Street"),
        ("1234.address", "10 Oak Lane"),
        ("json", '{"a": [1, 2]}'),
    ]
    broker.create_topic(TOPIC, 1)
    text = "".join(f"{key}:{value}\n" for key, value in lines)
    assert shell.run("produce", TOPIC, "--key-separator", ":", stdin=text.encode()).exit_code == 0
    raw = json.dumps({"key_base64": "/w==", "value_base64": "AP9h", "headers": [{"name": "h", "value": "x"}]})
    deleted = json.dumps({"key": "gone", "value": None})
    assert shell.run("produce", TOPIC, "--from-json", stdin=f"{raw}\n{deleted}\n".encode()).exit_code == 0
    return shell


def lines_of(shell: Shell, *arguments: str) -> list[dict[str, Any]]:
    result = shell.run("get", TOPIC, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_one_message(users: Shell) -> None:
    for arguments in (["1234.address"], ["--last", "1234.address"], ["--offset", "3"]):
        [found] = lines_of(users, *arguments)
        assert (found["offset"], found["key"], found["value"]) == (3, "1234.address", "10 Oak Lane")
    assert lines_of(users, "--next", "1234.address")[0]["offset"] == 2
    [raw] = lines_of(users, "--offset", "5")
    assert (raw["key_base64"], raw["value_base64"], raw["headers"][0]["value"]) == ("/w==", "AP9h", "x")


def test_a_batch_and_its_end(users: Shell) -> None:
    *found, end = lines_of(users, "--batch", "2", "--next", "1234.address")
    assert [message["offset"] for message in found] == [2, 3]
    assert end == {"status": 204, "description": "EOB", "num_pending": 0, "last_offset": {"0": 3}, "up_to": {"0": 6}}
    *found, end = lines_of(users, "--batch", "3")
    assert (len(found), end["num_pending"]) == (3, 4)
    *found, end = lines_of(users, "--batch", "3", "--all")
    assert (len(found), end["num_pending"]) == (7, 0)


def test_many_keys_at_one_point_in_time(users: Shell) -> None:
    *found, _ = lines_of(users, "--multi-last", "1234.>", "--up-to-offset", "0:2")
    assert [*found, _] == lines_of(users, "--multi-last", "1234.>", "--up-to-offset", "2")
    assert [message["value"] for message in found] == ["Bob", "Smith", "1 Main Street"]


def test_a_time_may_count_from_now(users: Shell) -> None:
    found = users.run("get", TOPIC, "--time", "-5m")
    assert (found.exit_code, found.stderr) == (0, "")


def test_nothing_that_matches_has_no_end_of_batch(users: Shell) -> None:
    """ADR-31: `404` if the request is valid but no matching message found in stream."""
    result = users.run("get", TOPIC, "--batch", "5", "--next", "nobody", "--json")
    assert (result.exit_code, result.stdout) == (1, "")


def test_values_are_shown_as_what_they_are(users: Shell) -> None:
    assert '"a": [' in users.run("get", TOPIC, "json").stdout
    shown = users.run("get", TOPIC, "--offset", "5").stdout
    assert "00 ff 61" in shown
    assert "header h: x" in shown
    assert "tombstone" in users.run("get", TOPIC, "gone").stderr
    assert "tombstone: the key is deleted" in users.run("get", TOPIC, "--last", "gone", "--tombstones").stdout


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (rb'{"text":"cut emoji \ud83d"}', [r'{"text":"cut emoji \ud83d"}']),
        (b"[" * 200_000 + b"]" * 200_000, ["[" * 200_000 + "]" * 200_000]),
        (b'{"a":0.12345678901234567890123,"a":1.10}', ["{", '  "a": 0.12345678901234567890123,', '  "a": 1.10', "}"]),
        (b"[1e400]", ["[", "  1e400", "]"]),
        (b"[1, 2", ["[1, 2"]),
        (b"a\rb \x1b[31m\tred\nend \xc2\x9b", [r"a\rb \x1b[31m" + "\tred", r"end \x9b"]),
    ],
    ids=["half a pair", "deep", "numbers", "large", "no JSON", "commands"],
)
def test_a_value_is_shown_unchanged_and_commands_no_terminal(
    capsys: pytest.CaptureFixture[str], value: bytes, lines: list[str]
) -> None:
    show_message(StoredMessage("orders", 0, 7, 0, None, value, (("a\x1bb", b"x"),)))
    assert capsys.readouterr().out.split("\n")[1:] == [r"header a\x1bb: x", *lines, ""]


def test_a_page_says_what_is_left(users: Shell) -> None:
    assert "5 more match: --all prints them" in users.run("get", TOPIC, "--batch", "2").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["key", "--offset", "1"], 2, "KEY alone"),
        (["--multi-last", "a", "--up-to-offset", "x"], 2, "PARTITION:OFFSET"),
        (["--multi-last", "a", "--up-to-offset", "²"], 2, "PARTITION:OFFSET"),
        (["--multi-last", "a", "--up-to-offset", "0:1", "--up-to-offset", "00:2"], 2, "partition 0 is named twice"),
        (["--time", "soon"], 2, "2026-01-31"),
        (["--multi-last", "a", "--up-to-time", "soon"], 2, "2026-01-31"),
        (["--offset", "-1"], 2, "not in the range x>=0"),
        (["--follow"], 2, "name where to begin"),
        (["--multi-last", "a", "--up-to-offset", "0:1", "--follow"], 2, "nothing to wait for"),
        ([], 1, "the request is empty: name --offset, --time, --last, --next, --batch or --multi-last"),
        (["--last", "offset=1.*"], 1, "--last 'offset=1.*' has a wildcard: --multi-last takes wildcards"),
        (["--multi-last", "a.>.b"], 1, "only the last token"),
        (["--offset", "3", "--time", "2026-01-31"], 1, "--offset and --time contradict each other"),
        (["--multi-last", "a", "--up-to-offset", "7:1"], 1, "--up-to-offset names partition 7: topic"),
        (["--offset", "99"], 1, "has no message for --offset 99"),
        (["gone"], 1, "--tombstones finds the tombstone"),
        (["k" * 9_000], 1, "for --last 'kkk"),
        (["nobody"], 1, "404"),
        (["--multi-last", "nobody"], 1, "no message that matches"),
        (["--batch", "1", "--partition", "7"], 1, "partitions 0 to 0"),
        (["--batch", "1", "--partitioner", "dice"], 1, "murmur2_random"),
    ],
)
def test_wrong_questions(users: Shell, arguments: list[str], code: int, says: str) -> None:
    """2: the line cannot be read. 1: the library refuses what it asks for, or the topic does not have it."""
    result = users.run("get", TOPIC, *arguments)
    assert result.exit_code == code, result.output
    text = " ".join(result.output.replace("│", " ").split())
    assert says in text
    assert len(text) < 500


def test_a_topic_that_is_not_there(shell: Shell, tmp_path: Path) -> None:
    result = shell.run("get", "nothing", "key")
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
    file = tmp_path / "no.idx"
    assert shell.run("get", "nothing", "key", "--index", str(file)).exit_code == 1
    assert not file.exists()


def test_an_index_is_built_and_used(users: Shell, tmp_path: Path) -> None:
    file = str(tmp_path / "users.idx")
    first = users.run("get", TOPIC, "1234.address", "--index", file)
    assert (first.exit_code, "is new: the keys of topic" in first.stderr) == (0, True)
    again = users.run("get", TOPIC, "1234.address", "--index", file)
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert lines_of(users, "1234.address", "--index", file) == lines_of(users, "1234.address")
    assert lines_of(users, "--multi-last", "1234.>", "--index", file) == lines_of(users, "--multi-last", "1234.>")
    other = users.run("get", "orders", "key", "--index", file)
    assert (other.exit_code, "the index of topic" in other.stderr) == (1, True)


def test_two_processes_make_one_index_at_once(users: Shell, tmp_path: Path) -> None:
    question = ("get", TOPIC, "--multi-last", "1234.>", "--index", str(tmp_path / "users.idx"), "--json")
    both = [users.start(*question) for _ in range(2)]
    answers = [process.communicate(timeout=DEADLINE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0] == users.run("get", TOPIC, "--multi-last", "1234.>", "--json").stdout


def test_an_answer_is_followed(users: Shell) -> None:
    with users.start("get", TOPIC, "--last", "json", "--follow", "--json") as follower:
        try:
            assert follower.stdout is not None
            assert json.loads(follower.stdout.readline())["value"] == '{"a": [1, 2]}'
            assert (
                users.run("produce", TOPIC, "--key-separator", ":", stdin=b"json:7\nother:8\njson:9\n").exit_code == 0
            )
            later = json.loads(follower.stdout.readline())["value"]
            while later != "9":  # each change, or the last of several
                assert later == "7"
                later = json.loads(follower.stdout.readline())["value"]
        finally:
            follower.send_signal(signal.SIGINT)
    assert follower.returncode == 0


def test_topics_are_listed_shown_and_purged(shell: Shell, broker: Broker) -> None:
    """The embedded broker deletes nothing when Kafka's clients ask: the refusal is named, and a dry run shows all."""
    broker.create_topic("purged", 2)
    assert shell.run("produce", "purged", "--partition", "1", stdin=b"1\n2\n3\n").exit_code == 0
    assert {"topic": "purged", "partitions": 2} in shell.json("topics", "ls")
    assert "__marshal" not in shell.run("topics", "ls").stdout
    where = {"leader": 1, "replicas": [1], "isr": [1]}
    assert shell.json("topics", "ls", "purged")["partitions"][1] == {"partition": 1, "first": 0, "end": 3, **where}
    assert "2 partitions, 3 offsets" in shell.run("topics", "ls", "purged").stdout
    planned = shell.json("topics", "purge", "purged", "--keep", "1", "--dry-run")
    assert planned["partitions"][1] == {"partition": 1, "before": 0, "after": 2, "end": 3}
    asked = shell.run("topics", "purge", "purged", "--keep", "1", stdin=b"n\n")
    assert (asked.exit_code, "Delete 2 offsets" in asked.stderr) == (1, True)
    refused = shell.run("topics", "purge", "purged", "--keep", "1", "--yes")
    assert (refused.exit_code, "deletes no records of purged:1" in refused.stderr) == (1, True)
    for arguments in ([], ["--keep", "1", "--before-offset", "1"], ["--before-offset", "9", "--partition", "1"]):
        assert shell.run("topics", "purge", "purged", *arguments, "--yes").exit_code == 1


@pytest.mark.parametrize("name", ["__marshal", "__consumer_offsets"])
@pytest.mark.parametrize(
    "arguments", [["create"], ["update", "--partitions", "99"], ["rm", "--yes"], ["purge", "--keep", "1", "--yes"]]
)
def test_topics_of_the_library_and_of_kafka_stay_as_they_are(shell: Shell, name: str, arguments: list[str]) -> None:
    verb, *rest = arguments
    refused = shell.run("topics", verb, name, *rest)
    assert (refused.exit_code, "belongs to the library or to Kafka" in refused.stderr) == (1, True)


@pytest.fixture(scope="module")
def example_topic(shell: Shell, broker: Broker) -> str:
    broker.create_topic("KV_mykv1", 1)
    direct_get_examples.load(shell, "KV_mykv1")
    return "KV_mykv1"


@pytest.mark.parametrize("example", direct_get_examples.EXAMPLES, ids=lambda example: example.request)
def test_the_examples_of_the_seed(shell: Shell, example_topic: str, example: Example) -> None:
    """ADR-31: `{"last_by_subj":"$KV.mykv1.mykey1"}` is answered by sequence 1, `hello`.

    `{"seq":1, "next_by_subj":"$KV.mykv1.mykey2"}` is answered by sequence 2, `goodbye`.
    `$JS.API.DIRECT.GET.KV_mykv1.$KV.mykv1.mykey1` without a payload is answered by sequence 1, `hello`.
    `$JS.API.DIRECT.GET.KV_mykv1.$KV.mykv1.mykey2` with the payload `{"seq":1, "next_by_subj":"$KV.mykv1.mykey2"}` is
    answered by 408 Bad Request.
    """
    found = direct_get_examples.answers(shell, example_topic, example)
    assert found[0]["topic"] == example_topic


def test_the_example_of_a_bad_request(shell: Shell, example_topic: str) -> None:
    """ADR-31: the payload beside a subject-appended key is refused."""
    direct_get_examples.refuses_a_payload(shell, example_topic)


def test_a_topic_without_dead_letters_says_so(users: Shell, broker: Broker) -> None:
    """It may be the data topic, given by mistake: another answer than that the options choose none."""
    none = users.run("dead-letters", "ls", TOPIC, "--group", "g")
    assert none.stderr == f"topic {TOPIC!r} has no dead letters: no message in it has the headers of one\n"
    broker.create_topic("dlq.get-users", 1)
    named = {"topic": TOPIC, "partition": "0", "offset": "1", "group": "g"}
    headers = [{"name": f"__dlq.errors.{name}", "value": value} for name, value in named.items()]
    letter = json.dumps({"value": "v", "headers": headers})
    assert users.run("produce", "dlq.get-users", "--from-json", stdin=letter.encode()).exit_code == 0
    other = users.run("dead-letters", "ls", "dlq.get-users", "--group", "another")
    assert other.stderr == "topic 'dlq.get-users' has no dead letter that was asked for\n"
