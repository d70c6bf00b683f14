"""The files for containers agree with each other and with the command line. No engine runs them here.

`make package` holds the manifests against the schemas of Kubernetes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import marshal_py
from marshal_py.cli.app import COMMANDS, load

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy" / "kubernetes"
IMAGE = f"marshal:{marshal_py.__version__}"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def check_command(words: list[str]) -> None:
    """Every option is one of this command."""
    program, name, *rest = words
    assert program == "marshal"
    assert name in COMMANDS
    known = {word for one in load(name).params for word in one.opts}
    assert {word for word in rest if word.startswith("--")} <= known


@pytest.mark.parametrize("name", ["consumer.yaml", "exporter.yaml"])
def test_a_deployment_selects_its_pods_and_probes_its_port(name: str) -> None:
    deployment, other = documents(name)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    selector = other["spec"]["selector"]
    assert selector.get("matchLabels", selector) == labels
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    assert container["image"] == IMAGE
    check_command(container["args"])
    (port,) = container["ports"]
    assert str(port["containerPort"]) in container["args"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]


def test_keda_scales_the_consumers_by_the_exporter() -> None:
    (scaled,), (consumer, budget), (_, service) = map(documents, ("keda.yaml", "consumer.yaml", "exporter.yaml"))
    assert scaled["spec"]["scaleTargetRef"]["name"] == consumer["metadata"]["name"] == budget["metadata"]["name"]
    args = consumer["spec"]["template"]["spec"]["containers"][0]["args"]
    (trigger,) = scaled["spec"]["triggers"]
    group = args[args.index("--group") + 1]
    where = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert trigger["type"] == "metrics-api"
    assert trigger["metadata"]["url"] == f"http://{where}/keda/{group}"


def test_compose_starts_three_brokers_and_three_consumers() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    services = compose["services"]
    brokers = {name for name in services if name.startswith("kafka-")}
    assert len(brokers) == services["consumer"]["deploy"]["replicas"] == 3
    assert set(services["topic"]["depends_on"]) == brokers
    for name in ("topic", "consumer"):
        assert services[name]["image"] == IMAGE
        servers = services[name]["environment"]["MARSHAL_BOOTSTRAP_SERVERS"].split(",")
        assert {server.partition(":")[0] for server in servers} == brokers
    check_command(services["consumer"]["command"])


def test_the_image_is_small_and_not_root() -> None:
    """`COPY .` brings what .dockerignore lets through: what the build needs, and nothing else."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER [1-9]", text, re.MULTILINE)
    assert re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE) == ['["marshal", "run", "--"]']
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "*"
    let_through = [line[1:] for line in lines if line.startswith("!")]
    assert all((ROOT / name).exists() for name in let_through)
    assert {"pyproject.toml", "hatch_build.py", "marshal_py"} <= set(let_through)


def test_the_development_container_has_java() -> None:
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert any("java" in feature for feature in found["features"])
    assert found["postCreateCommand"] == "make check"
