"""For all tests: hypothesis' profiles, the plugins of tests/support, and a header with the versions of libraries.

`default`: the same examples on every machine and in every run, so that a failure is the same for everybody.
`proof`: more of them, for `make proof`.
`soak`: many more examples under a new seed, which the header shows with the option that repeats the run.

A property takes its number of examples from the profile. `soak` proves nothing more of one that sets `max_examples`.
"""

from __future__ import annotations

import gc
import platform
import random
import signal
from collections.abc import Generator

import confluent_kafka
import hypothesis
import pytest
from hypothesis import HealthCheck, settings

# A real Kafka and a PostgreSQL, each started by the first test that asks for it; how a process of pytest-xdist crashed;
# the selection and distribution of test files; the package's own plugin for its users; and pytester, which runs pytest
# inside a test.
pytest_plugins = [
    "tests.support.clusters",
    "tests.support.postgres",
    "tests.support.crashes",
    "tests.support.file_times",
    "tests.support.file_scheduler",  # imports the one before
    "marshal_py.testing.plugin",
    "pytester",
]

SOAK_EXAMPLES_MAX = 1_000  # per property and round: minutes for all; `make soak` runs rounds

# No deadline and no complaint about slow generation: both measure the machine, and test machines are shared.
for _profile, _examples in (("default", 40), ("proof", 200)):
    settings.register_profile(
        _profile,
        derandomize=True,
        max_examples=_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.register_profile(
    "soak",
    derandomize=False,
    max_examples=SOAK_EXAMPLES_MAX,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Loaded before the plugin reads --hypothesis-profile: where CI is set, it would otherwise be hypothesis' CI profile.
settings.load_profile("default")


# A background job of a shell without job control (some CI runners) ignores Ctrl-C, and `nohup` the end of its terminal;
# so would every command that a test starts and interrupts.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.hookimpl(tryfirst=True)  # before hypothesis' plugin reads the option
def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed of a `soak` run, so that the header can show it before the first example."""
    if config.getoption("--hypothesis-profile") == "soak" and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**64))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Lets Python's collector of garbage pass over what importing and listing all tests makes: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [
        f"marshal_py on Python {platform.python_version()}, confluent-kafka {confluent_kafka.__version__}, "
        f"librdkafka {confluent_kafka.libversion()[0]}, hypothesis {hypothesis.__version__}"
    ]
    seed = config.getoption("--hypothesis-seed")
    if seed is not None:
        lines.append(f"hypothesis seed {seed}; to repeat: --hypothesis-seed={seed}")
    return lines
