"""The pytest plugin: the guide's examples under pytest-xdist, and runs that do not use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marshal_py.testing import EmbeddedCluster, LocalCluster, MemoryCluster
from tests.support import dumps

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "testing.md").read_text()
TESTS = 8  # of the guide


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project whose conftest.py and tests are the blocks of docs/testing.md."""
    [conftest] = re.findall(r"```python conftest\n(.*?)```", GUIDE, re.DOTALL)
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_guide="\n\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)))
    return pytester


def test_the_examples_of_the_guide_in_parallel(project: pytest.Pytester) -> None:
    project.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", "-n", "2").assert_outcomes(passed=TESTS)


def test_runs_that_do_not_use_it_do_not_load_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported(request):
            assert not [name for name in sys.modules if name.partition(".")[0] in ("marshal_py", "confluent_kafka")]

        def test_there_is_no_fixture(marshal_broker):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'marshal_broker' not found*"])


def test_the_default_is_in_memory(marshal_broker: LocalCluster) -> None:
    assert isinstance(marshal_broker, MemoryCluster)


@pytest.mark.parametrize("marshal_broker_kind", ["embedded"])
def test_the_embedded_broker_on_request(marshal_broker: LocalCluster) -> None:
    assert isinstance(marshal_broker, EmbeddedCluster)


class TestOfAClass:
    @pytest.fixture
    def marshal_broker_kind(self) -> str:
        return "embedded"

    def test_a_module_or_a_class_overrides_the_kind(self, marshal_broker: LocalCluster) -> None:
        assert isinstance(marshal_broker, EmbeddedCluster)


def test_an_incident_of_the_guide(pytester: pytest.Pytester, tmp_path: Path) -> None:
    [incident] = re.findall(r"```python incident\n(.*?)```", GUIDE, re.DOTALL)
    pytester.makeconftest('pytest_plugins = ["marshal_py.testing.plugin"]')
    pytester.makepyfile(incident)
    dumps.of_run(tmp_path / "incident.jsonl", 3)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", f"--marshal-dump={tmp_path / 'incident.jsonl'}")
    done.assert_outcomes(passed=1)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*marshal_replay needs a dump: pytest --marshal-dump=FILE*"])
