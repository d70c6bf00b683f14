"""The library works with its declared dependencies alone; the command says in one line what it lacks.

Each test runs a new interpreter in which other packages cannot be imported, as if they were not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
LIBRARY = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in DEPENDENCIES}

HIDE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {hidden!r} if {hidden!r} else top not in sys.stdlib_module_names | {shown!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""

CONSUME = """
from confluent_kafka import Producer
import marshal_py
from marshal_py.embedded import Broker

with Broker() as broker:
    broker.create_topic("__marshal", 1)
    broker.create_topic("orders", 2)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "log_level": 2})
    producer.produce("orders", b"one", partition=1)
    assert producer.flush(30) == 0
    with marshal_py.connect(broker.bootstrap_servers) as marshal:
        with marshal.consumer("billing", ["orders"], start="earliest") as consumer:
            message = consumer.next()
            print(message.value.decode(), message.ack())
"""


def run(program: str, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs `program` without the packages `hidden`; if none is named, without all but the declared dependencies."""
    hide = HIDE.format(hidden=hidden, shown=LIBRARY | {"marshal_py"})
    return subprocess.run(
        [sys.executable, "-c", hide + program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_consumer_needs_the_declared_dependencies_alone() -> None:
    done = run(CONSUME)
    assert done.stdout == "one True\n", done.stderr


def test_public_modules_need_them_alone() -> None:
    done = run("import marshal_py.embedded, marshal_py.metrics, marshal_py.otel, marshal_py.spark, marshal_py.sql")
    assert done.returncode == 0, done.stderr


def test_tracing_imports_nothing_before_it_is_used_and_says_what_to_install() -> None:
    program = "import sys, marshal_py.otel; print('opentelemetry' in sys.modules); marshal_py.otel.traced(print)"
    done = run(program)
    assert (done.returncode, done.stdout) == (1, "False\n")
    assert done.stderr.splitlines()[-1].endswith("pip install 'marshal_py[otel]'")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_says_what_to_install(package: str) -> None:
    done = run("import sys; sys.argv = ['marshal', 'state']; from marshal_py.cli import main; main()", (package,))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"marshal: {package} is not installed here: pip install 'marshal_py[cli]'\n"


def test_keys_of_admins_say_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "ops.key"
    ask = ["marshal", "keys", str(file), "--generate"]
    done = run(f"import sys; sys.argv = {ask}; from marshal_py.cli import main; main()", ("cryptography",))
    assert (done.returncode, file.exists()) == (1, False)
    assert "pip install 'marshal_py[keys]'" in done.stderr


def test_a_reader_of_a_group_with_keys_says_what_to_install() -> None:
    done = run("from marshal_py.protocol.member import waiting; print(waiting.READABLE)", ("cryptography",))
    assert "pip install 'marshal_py[keys]'" in done.stdout, done.stderr


def test_a_registry_says_what_to_install() -> None:
    ask = ["marshal", "get", "users", "key", "--schema-registry", "http://here", "--bootstrap-servers", "here:1"]
    done = run(f"import sys; sys.argv = {ask}; from marshal_py.cli import main; main()", ("fastavro",))
    assert done.returncode == 1
    assert "No module named 'fastavro'" in done.stderr
    assert done.stderr.endswith("pip install 'marshal_py[schema-registry]'\n")


def test_any_other_missing_package_is_an_error_as_usual() -> None:
    done = run("import sys; sys.argv = ['marshal', 'state']; from marshal_py.cli import main; main()", ("msgspec",))
    assert done.returncode == 1
    assert "No module named 'msgspec'" in done.stderr


def test_packages_are_hidden() -> None:
    """Otherwise the tests above would show nothing."""
    assert "No module named 'typer'" in run("import typer").stderr
    assert sorted(LIBRARY) == ["confluent_kafka", "mmh3", "msgspec"]
