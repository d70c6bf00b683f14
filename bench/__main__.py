"""Runs benchmarks: `python -m bench [NAME...] [--tiny | --quick] [--json FILE] [--bootstrap-servers HOST:PORT,...]`.

Prints the machine, the date and the versions, then a table per benchmark with its notes, and writes everything as JSON.
Without `--bootstrap-servers` (or MARSHAL_TEST_BOOTSTRAP) it starts its own one-node Apache Kafka. A benchmark that
fails is reported, the others continue, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import confluent_kafka

import marshal_py
from bench import peers
from bench.environment import BenchEnvironment, Result, open_environment, show
from tests.support.jars import KafkaUnavailable

# The quick ones first, so that the first tables appear early.
NAMES = (
    "fold",
    "scale",
    "group_processes",
    "threads",
    "races",
    "sweep",
    "stream",
    "spark",
    "memory",
    "startup",
    "operator",
    "claims",
    "traffic",
    "throughput",
    "direct_get",
    "latency",
    "event_loop",
    "process",
    "parallel",
    "join",
    "leave",
    "rewind",
    "backlog",
    "takeover",
    "policies",
    "peers",
)


def machine() -> dict[str, Any]:
    """The machine on which the figures are measured, and its load."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def versions(environment: BenchEnvironment) -> dict[str, str]:
    found = {
        "marshal_py": marshal_py.__version__,
        "Python": platform.python_version(),
        "confluent-kafka": confluent_kafka.__version__,
        "librdkafka": str(confluent_kafka.libversion()[0]),
        "Kafka": environment.description,
    }
    for package in ("aiokafka", "faststream", "msgspec", "pyarrow", "pyspark"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def measure(environment: BenchEnvironment, names: list[str], tiny: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs and shows the benchmarks. Returns the results as JSON, and the names of those that failed."""
    results, failed = [], []
    for name in names:
        module = importlib.import_module(f"bench.{name}")
        began = time.monotonic()
        environment.say(name)
        try:
            result: Result = module.run(environment, tiny)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        took_s = round(time.monotonic() - began, 1)
        show(result, (inspect.getdoc(module) or "").partition("\n")[0])
        results.append({**result.as_json(), "took_s": took_s})
        environment.say(f"{name} took {took_s:g} s")
    return results, failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks against a real Apache Kafka.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all of them by default")
    parser.add_argument("--tiny", action="store_true", help="the same path in seconds; the figures mean nothing")
    parser.add_argument("--quick", action="store_true", help="peers within minutes: fewer contestants and kills")
    parser.add_argument("--write", action="store_true", help="write the picture of peers, print its table as Markdown")
    parser.add_argument("--json", type=Path, default=Path("bench-results.json"), metavar="FILE")
    parser.add_argument("--bootstrap-servers", metavar="HOST:PORT,...", help="a cluster to measure on")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    try:
        with open_environment(arguments.bootstrap_servers) as environment:
            environment.quick = arguments.quick
            about = {"machine": machine(), "versions": versions(environment), "tiny": arguments.tiny}
            for part in ("machine", "versions"):
                print(", ".join(f"{key} {value}" for key, value in about[part].items()))
            if arguments.tiny:
                print("--tiny: a trial of the benchmarks themselves; the figures mean nothing.")
            print()
            names = [name for name in NAMES if name in arguments.names or not arguments.names]
            results, failed = measure(environment, names, arguments.tiny)
    except KafkaUnavailable as error:
        sys.exit(f"no Kafka: {error}")
    for result in results if arguments.write else ():
        if result["name"] == "peers":
            on = about["machine"]
            where = f"{on['date'][:10]}, load {on['load_before']} before"
            print(peers.write(result["raw"], f"{where}, {about['versions']['Kafka']}"))
    arguments.json.write_text(json.dumps({**about, "results": results, "failed": failed}, indent=1) + "\n")
    print(f"written to {arguments.json}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
