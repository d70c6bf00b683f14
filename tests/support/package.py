"""Builds the wheel and the sdist, twice, and tries each in an environment that has nothing else (`make package`).

Two builds of one commit have equal bytes. The archives have the files that git tracks, and no others. Each installation
consumes from the embedded broker, with nothing of the repository on its path, and says how large it is with its
dependencies.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_BYTES_MAX = 25_000_000  # `pip install marshal_py`, with its dependencies
# What a user does first, without any extra. It prints what it imported from where.
FIRST_STEPS = """
import marshal_py, sys
from importlib.resources import files
from marshal_py.testing import EmbeddedCluster

assert files(marshal_py).joinpath("py.typed").is_file()
with EmbeddedCluster() as cluster:
    cluster.create_topic("orders", 2)
    cluster.produce_many("orders", [b"a", b"b"], partition=0)
    with marshal_py.connect(cluster.bootstrap_servers) as marshal:
        with marshal.consumer("billing", ["orders"], start="committed|earliest") as consumer:
            for expected in (b"a", b"b"):
                message = consumer.next(60.0)
                assert message is not None and message.value == expected
                message.ack()
print(marshal_py.__version__, marshal_py.__file__)
"""


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def tracked() -> set[str]:
    return set(git("ls-files").splitlines())


def build(into: Path) -> list[Path]:
    """Builds both archives of the last commit, in a folder of their own, and the wheel from the sdist."""
    source = into / "source"
    source.mkdir(parents=True)
    archive = into / "source.tar"
    git("archive", "--format=tar", f"--output={archive}", "HEAD")
    with tarfile.open(archive) as found:
        found.extractall(source, filter="data")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}
    run(sys.executable, "-m", "build", "--outdir", str(into / "dist"), str(source), env=environment)
    return sorted((into / "dist").iterdir())


def run(*words: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")
    if done.returncode:
        raise SystemExit(f"{' '.join(words)[:200]}\n{done.stdout}")
    return done.stdout


def foreign(names: set[str], settings: dict[str, Any]) -> list[str]:
    """The files of the wheel that git does not track in one of its packages, and those of a package that it lacks."""
    packages = tuple(f"{name}/" for name in settings["packages"])
    wanted = {name for name in tracked() if name.startswith(packages)}
    found = {name for name in names if ".dist-info/" not in name}
    return sorted(found ^ wanted)


def check_contents(archives: list[Path], project: dict[str, Any]) -> None:
    sdist, wheel = archives if archives[0].name.endswith(".tar.gz") else archives[::-1]
    targets = project["tool"]["hatch"]["build"]["targets"]
    with zipfile.ZipFile(wheel) as found:
        if wrong := foreign(set(found.namelist()), targets["wheel"]):
            raise SystemExit(f"{wheel.name}: not as git has it: {', '.join(wrong)}")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    excluded = tuple(name.lstrip("/") for name in targets["sdist"]["exclude"])
    wanted = {name for name in tracked() if not name.startswith(excluded)} | {"PKG-INFO"}
    if wrong := sorted(names ^ wanted):
        raise SystemExit(f"{sdist.name}: not as git has it: {', '.join(wrong)}")


def installed_bytes(environment: Path) -> int:
    """The size of all that is installed there, but pip, without compiled files."""
    (site,) = environment.glob("lib/python3.*/site-packages")
    return sum(
        path.stat().st_size
        for path in site.rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and not path.relative_to(site).parts[0].startswith(("pip", "setuptools", "pkg_resources", "_distutils_hack"))
    )


def try_out(archive: Path, environment: Path, version: str) -> None:
    """Installs an archive without extras, then with those that are small, and does what a user does first."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(archive), env=clean)
    said = run(python, "-W", "error", "-c", FIRST_STEPS, env=clean).split()
    assert said == [version, said[1]], said
    assert Path(said[1]).is_relative_to(environment), said
    size = installed_bytes(environment)
    print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB, {size / 1e6:.1f} MB installed with dependencies")
    if size > INSTALLED_BYTES_MAX:
        raise SystemExit(f"more than {INSTALLED_BYTES_MAX / 1e6:.0f} MB")
    run(python, "-m", "pip", "install", "--quiet", f"{archive}[cli,metrics,otel,testing]", env=clean)
    assert run(str(environment / "bin" / "marshal"), "--version", env=clean).split()[-1] == version
    run(str(environment / "bin" / "marshal"), "simulate", "--help", env=clean)
    run(python, "-c", "import marshal_py.metrics, marshal_py.otel, marshal_py.testing.plugin", env=clean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("into", type=Path)
    into: Path = parser.parse_args().into.absolute()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="marshal-package-") as temporary:
        first, second = (build(Path(temporary, name)) for name in ("first", "second"))
        for one, other in zip(first, second, strict=True):
            if one.read_bytes() != other.read_bytes():
                raise SystemExit(f"{one.name}: two builds of one commit differ")
        check_contents(first, project)
        for number, archive in enumerate(first):
            try_out(archive, Path(temporary, f"environment-{number}"), project["project"]["version"])
        into.mkdir(parents=True, exist_ok=True)
        for archive in first:
            (into / archive.name).write_bytes(archive.read_bytes())
            print(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {into / archive.name}")


if __name__ == "__main__":
    main()
