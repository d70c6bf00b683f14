"""Every requirement sentence of the designs in tests/seeds has a test that quotes it."""

from __future__ import annotations

from tests.support.seeds import OPEN, REPOSITORY, Quoted, generated, quotes_of, seed_of, seeds_under, table

SEED = """# A design (AD-1)

It says:

## Reading

- Read `it`
  twice.
- Never | write.
  > differs: seldom
- Ask a server.
  > no meaning here: there is none
"""
TESTS = '''
def test_reading():
    """AD-1: read it, Read it twice. And more."""

def test_another_design():
    """Never | write."""

def helper():
    """AD-1: Never | write."""
'''


def test_no_sentence_is_without_a_test() -> None:
    open_ = [line for line in generated().splitlines() if OPEN in line]
    assert not open_, "\n".join(open_)


def test_each_sentence_is_listed_once() -> None:
    found = [sentence for seed in seeds_under(REPOSITORY) for part in seed.sections.values() for sentence in part]
    assert len(found) == len(set(found)) > 40


def test_what_the_table_shows() -> None:
    """A quotation may be broken into lines; a function that is no test shows nothing."""
    seed, quotes = seed_of(SEED), list(quotes_of("tests/test_a.py", TESTS))
    assert seed.sections == {"Reading": ["Read `it` twice.", "Never | write.", "Ask a server."]}
    assert quotes[0] == Quoted("tests/test_a.py::test_reading", "AD-1: read it, Read it twice. And more.")
    lines = table([seed], quotes).splitlines()
    assert "| Read `it` twice. | `tests/test_a.py::test_reading` | as written |" in lines
    assert rf"| Never \| write. | {OPEN} | differs: seldom |" in lines
    assert "| Ask a server. |  | no meaning here: there is none |" in lines
