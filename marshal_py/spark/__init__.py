"""Pipelines on PySpark: claimed streams and batches, tables, the coordination log as data.

Spark is an extra (`pip install 'marshal_py[spark]'`), and importing it takes a second. So this file imports it only
when a name is used; without Spark that raises UnsupportedPlatform, which says what to install.

`spark.read.format("marshal-...")` works without a call that registers it: Spark searches for top-level packages called
`pyspark_*` and registers the class `DefaultSource` of each, so every format has such a small package beside this one.
Spark imports them in every process that looks for a format, so they must import nothing but Spark's base class before
they are used.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import Any, Final

from marshal_py.errors import UnsupportedPlatform

INSTALL: Final = "pip install 'marshal_py[spark]'"
PYSPARK_MIN: Final = (4, 2)  # the first whose Python sources know ReadLimit and Trigger.AvailableNow

# Public name -> the package that it needs beside Spark, and the extra that brings it.
_PACKAGES: Final = {"DeltaOutput": ("deltalake", "delta"), "IcebergOutput": ("pyiceberg", "iceberg")}

# Public name -> the file that defines it.
_FILES: Final = {
    "Database": "marshal_py.spark.sinks.database",
    "DeltaOutput": "marshal_py.spark.sinks.delta",
    "IcebergOutput": "marshal_py.spark.sinks.iceberg",
    "QueryListener": "marshal_py.spark.stream.listener",
    "claimed_batches": "marshal_py.spark.stream.batches",
    "local_session": "marshal_py.spark.stream.session",
    "prometheus_gauges": "marshal_py.spark.stream.listener",
    "report": "marshal_py.spark.reports",
    "views": "marshal_py.spark.reports",
    "write_batch": "marshal_py.spark.sinks.guards",
}

__all__ = [  # __getattr__ provides them
    "Database",
    "DeltaOutput",
    "IcebergOutput",
    "QueryListener",
    "claimed_batches",
    "local_session",
    "prometheus_gauges",
    "report",
    "views",
    "write_batch",
]


def require_spark() -> None:
    """Checks that pyspark, pyarrow and pandas are installed and new enough. Raises UnsupportedPlatform."""
    for package in ("pyspark", "pyarrow", "pandas"):
        if util.find_spec(package) is None:
            raise UnsupportedPlatform("Spark", f"a Python without {package}", INSTALL)
    found = _version()
    if tuple(int(part) for part in found.split(".")[:2]) < PYSPARK_MIN:
        wanted = ".".join(map(str, PYSPARK_MIN))
        raise UnsupportedPlatform("marshal_py.spark", f"pyspark {found}", f"{wanted} or newer is needed; {INSTALL}")


def _version() -> str:
    """Returns the version of pyspark. If pip has not installed it under this name, asks the module itself."""
    from importlib import metadata  # here, because it loads the package email: 0.03 s of each process that reads

    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:  # SPARK_HOME/python in the path, or the light client of Spark Connect
        return str(import_module("pyspark.version").__version__)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_spark()
    if name in _PACKAGES and util.find_spec(_PACKAGES[name][0]) is None:
        package, extra = _PACKAGES[name]
        raise UnsupportedPlatform(name, f"a Python without {package}", f"pip install 'marshal_py[{extra}]'")
    return getattr(import_module(_FILES[name]), name)
