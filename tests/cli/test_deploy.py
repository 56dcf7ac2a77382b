"""Files of docs/deploy: what they say to forerun is what forerun takes."""

from pathlib import Path

import pytest
import yaml

from forerun.cli.command_line import build_parser
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def container():
    """The container of kubernetes.yaml, and the pod around it."""
    (deployment,) = [one for one in documents("kubernetes.yaml") if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    return pod["containers"][0], pod


COMMANDS = {
    "compose": documents("compose.yaml")[0]["services"]["forerun"]["command"],
    "kubernetes": container()[0]["args"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_their_command_lines_are_taken(words):
    arguments = build_parser().parse_args(["serve", *words])
    assert configured(EngineConfig, arguments).model == "smollm2-135m"
    assert "forerun" in configured(ServeSettings, arguments).allowed_hosts


def test_volumes_ports_and_grace_belong_together():
    held, pod = container()
    assert {one["name"] for one in held["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    ports = {one["name"]: one["containerPort"] for one in held["ports"]}
    assert ports["http"] == ServeSettings().port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert held[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert pod["terminationGracePeriodSeconds"] > ServeSettings().drain_seconds
    service = documents("compose.yaml")[0]["services"]["forerun"]
    assert float(service["stop_grace_period"].removesuffix("s")) > ServeSettings().drain_seconds
    assert service["ports"] == [f"127.0.0.1:{ServeSettings().port}:{ServeSettings().port}"]


def test_files_that_compose_mounts_are_there():
    services = documents("compose.yaml")[0]["services"]
    volumes = [one for service in services.values() for one in service.get("volumes", ())]
    mounted = [one.partition(":")[0] for one in volumes if one.startswith(".")]
    assert len(mounted) >= 4
    for path in mounted:
        assert (DEPLOY / path).is_file(), path
