"""The times per test file: how they are added up, written and held against the budget (tests/support/file_times.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import file_times

ROOT = Path(__file__).parents[1]

HEAD = "file\tcpu_s\twall_s\n"


def test_the_table_names_no_file_twice_and_none_that_is_gone() -> None:
    lines = file_times.TABLE.read_text(encoding="utf-8").splitlines()
    files = [line.partition("\t")[0] for line in lines[1:]]
    present = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(files) == len(set(files))
    assert set(files) <= present, "a file that is gone has no budget"


def test_a_table_is_read_as_it_was_written() -> None:
    text = file_times.written({"tests/a.py": (1.0, 2.0), "tests/b.py": (3.25, 0.5)})
    assert text == HEAD + "tests/b.py\t3.2\t0.5\ntests/a.py\t1.0\t2.0\n"
    assert file_times.read(text) == {"tests/a.py": 1.0, "tests/b.py": 3.2}


@pytest.mark.parametrize(("cpu_s", "told"), [(70.0, False), (70.1, True)])
def test_a_file_may_take_four_times_its_budget_and_half_a_minute(cpu_s: float, told: bool) -> None:
    for budget in ({"tests/a.py": 10.0}, {}):
        assert bool(file_times.exceeded({"tests/a.py": (cpu_s, 0.0)}, budget)) is told


@pytest.mark.parametrize(("processes", "budget"), [([], 0.1), (["-n", "2"], 0.1), (["-n", "2"], 100.0)], ids=str)
def test_a_run_beyond_the_budget_fails(
    processes: list[str], budget: float, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with xdist, whose processes send what each test has used."""
    pytester.makepyfile(test_it="def test_it(): pass")
    pytester.makeconftest(
        """
        import pathlib
        from tests.support import file_times
        file_times.EXTRA_S = -1.0
        file_times.TABLE = pathlib.Path(__file__).with_name("times.tsv")
        """
    )
    pytester.path.joinpath("times.tsv").write_text(f"{HEAD}test_it.py\t{budget}\t0\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = pytester.runpytest_subprocess(
        "-p", "tests.support.file_times", *processes, "--file-times=all.tsv", "-p", "no:cacheprovider"
    )
    assert bool(done.ret) is (budget < 1.0)
    assert ("BUDGET test_it.py took 0 CPU seconds" in done.stdout.str()) is (budget < 1.0)
    assert list(file_times.read(pytester.path.joinpath("all.tsv").read_text(encoding="utf-8"))) == ["test_it.py"]


def test_children_count_in_the_test_that_uses_them_and_not_in_fixtures(pytester: pytest.Pytester) -> None:
    """A broker of the whole session begins in the set-up of some file and ends in the tear-down of another."""
    loop = "for _ in range(10_000_000): pass"
    burn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loop!r}])"
    pytester.makepyfile(
        test_earlier=f"""
        import pytest, subprocess, sys
        @pytest.fixture
        def ended():
            process = subprocess.Popen([sys.executable, '-c', {loop!r}], stdout=subprocess.PIPE)
            with process.stdout:
                assert process.stdout.read() == b'', 'until it ends'
            return process
        def test_it(ended): ended.wait()
        """,
        test_fixture=f"""
        import pytest
        @pytest.fixture
        def broker():
            {burn}
            yield
            {burn}
        def test_it(broker): pass
        """,
        test_call=f"def test_it():\n    {burn}",
    )
    found = pytester.inline_run(
        "-p", "tests.support.file_times", "-p", "no:cacheprovider", plugins=[collected := Collected()]
    )
    found.assertoutcome(passed=3)
    assert collected.cpu_s["test_call.py"] > 2 * collected.cpu_s["test_fixture.py"]
    assert collected.cpu_s["test_call.py"] > 2 * collected.cpu_s["test_earlier.py"], "not of the test that waits for it"


class Collected:
    """CPU seconds by file, as the reports have them."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.cpu_s[file] = self.cpu_s.get(file, 0.0) + report.cpu_s  # type: ignore[attr-defined]
