"""The files of deploy/ say what is so: their flags and variables exist, what they copy is there, the health check tells."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deltic.__main__ import parser
from deltic.config import ServerConfig
from deltic.config_sources import check_environment, read_config, resolve
from deltic.server.app import ROUTES
from tests.fake_engine import FakeEngineClient, make_app, served
from tests.null.test_dashboard import RULES, TOLD

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "deltic.service").read_text()
IMAGE = (DEPLOY / "Containerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["deltic"]
COMPOSE_GPU: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["deltic"]
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
AUTOSCALE: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.autoscale.yaml").read_text()))


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def of_unit(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_the_commands_are_ours() -> None:
    lines = [of_unit("ExecStart").removeprefix("/opt/deltic/bin/deltic ")]
    lines += [shlex.join(COMPOSE["command"]), shlex.join(COMPOSE_GPU["command"])]
    lines += re.findall(r"^#.* deltic(?::gpu)? (serve .*)$", IMAGE, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        assert parser().parse_args(shlex.split(line)).used.prog == "deltic serve"
    assert json.loads(re.findall(r"^CMD (.*)$", IMAGE, re.MULTILINE)[0]) == ["serve"]


def settings_of(container: dict[str, Any]) -> ServerConfig:
    given = vars(parser().parse_args(container["args"]))
    names = {field.name for field in dataclasses.fields(ServerConfig)}
    return resolve(ServerConfig, {name: value for name, value in given.items() if name in names}, {})


def test_two_pods_of_kubernetes_stop_one_by_one() -> None:
    deployment, service, budget = KUBERNETES
    assert [one["kind"] for one in KUBERNETES] == ["Deployment", "Service", "PodDisruptionBudget"]
    assert deployment["spec"]["replicas"] == 2 and budget["spec"]["maxUnavailable"] == 1
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    spread = [each["labelSelector"]["matchLabels"] for each in pod["spec"]["topologySpreadConstraints"]]
    chosen = [one["spec"]["selector"]["matchLabels"] for one in (deployment, budget)]
    for selector in (*chosen, *spread, service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    (container,) = pod["spec"]["containers"]
    config = settings_of(container)
    assert labels["llm-d.ai/engine-type"] == "vllm" and config.metrics_names == "both"
    ready, start, live = (container[f"{name}Probe"] for name in ("readiness", "startup", "liveness"))
    notices_s = ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"]
    assert notices_s < config.drain_notice_s, "nobody sends anything more when it refuses"
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.drain_notice_s + config.drain_s + 10
    assert (
        pod["spec"]["securityContext"]["runAsNonRoot"]
        and f"USER {pod['spec']['securityContext']['runAsUser']}:" in IMAGE
    )
    (port,) = container["ports"]
    assert port["containerPort"] == 8000 and service["spec"]["ports"][0]["targetPort"] == port["name"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"cache": "/cache", "tmp": "/tmp", "keys": "/keys"}
    assert {one["name"] for one in pod["spec"]["volumes"]} == set(mounts)
    assert str(config.api_key_file) == "/keys/keys.toml"
    assert "--from-file=keys.toml" in (DEPLOY / "kubernetes.yaml").read_text()
    engine = FakeEngineClient()
    app = make_app(engine)
    with served(app) as url:
        for state, leaving, is_ready in (("ready", False, True), ("restarting", False, False), ("ready", True, False)):
            engine.state, app.state.server.is_leaving = state, leaving  # type: ignore[assignment]
            assert (httpx.get(url + ready["httpGet"]["path"]).status_code == 200) is is_ready
            assert all(httpx.get(url + probe["httpGet"]["path"]).status_code == 200 for probe in (start, live))


def test_more_servers_come_by_what_the_server_tells() -> None:
    scaler, monitor = AUTOSCALE
    deployment = KUBERNETES[0]
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": deployment["metadata"]["name"],
    }  # fmt: skip
    assert scaler["spec"]["minReplicas"] == deployment["spec"]["replicas"] < scaler["spec"]["maxReplicas"]
    metrics = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert metrics <= TOLD.keys(), "no such numbers in /metrics"
    (rule,) = re.findall(r"__name__=~\"(.*?)\"", (DEPLOY / "kubernetes.autoscale.yaml").read_text())
    assert set(rule.split("|")) == metrics, "the adapter brings others"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert endpoint["port"] == port["name"] and endpoint["path"] in {route.path for route in ROUTES}
    jobs = {job for each in RULES for job in re.findall(r'job="(\w+)"', each["expr"])}
    assert {row["replacement"] for row in endpoint["relabelings"] if row["targetLabel"] == "job"} == jobs


def test_the_settings_are_ours() -> None:
    (table,) = read_config(DEPLOY / "deltic.toml")
    assert resolve(ServerConfig, {}, {}, table).log_format == "json"
    assert {"model", "quantize"} <= table.keys()
    in_image = dict(re.findall(r"(DELTIC_\w+)=(\S+)", IMAGE.partition("ENV ")[2]))
    check_environment(in_image | {name: "x" for name in COMPOSE["environment"]})
    check_environment(dict.fromkeys(re.findall(r"DELTIC_[A-Z_]*[A-Z]", UNIT + IMAGE), "x"))
    assert resolve(ServerConfig, {}, in_image).host == "0.0.0.0"


def test_what_is_stopped_may_finish() -> None:
    (table,) = read_config(DEPLOY / "deltic.toml")
    config = resolve(ServerConfig, {}, {}, table)
    assert seconds(of_unit("TimeoutStopSec")) > config.drain_notice_s + config.drain_s + 10
    assert seconds(COMPOSE["stop_grace_period"]) > ServerConfig.drain_notice_s + ServerConfig.drain_s + 10
    assert of_unit("KillMode") == "mixed", "the engine is the server's to stop"


def test_the_image_is_made_of_what_is_there() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", IMAGE, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "CMakeLists.txt", project["readme"], *project["license-files"], "deltic"} == names
    kept = {
        line[1:] for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert kept == names
    assert re.findall(r"\.whl\)\[(.*?)\]", IMAGE) == ["${EXTRAS}", "gpu"]
    extras = re.findall(r"^ARG EXTRAS=(.*)$", IMAGE, re.MULTILINE)[0].split(",")
    assert {"speech", "video", "pdf"} == set(extras) <= project["optional-dependencies"].keys() - {"gpu"}
    assert COMPOSE["build"] == {"context": "..", "dockerfile": "deploy/Containerfile"}
    assert COMPOSE_GPU["build"] == {"target": "gpu"}


def stages() -> dict[str, list[str]]:
    """The lines of each stage of the image by its name, behind those of the stage that it begins with."""
    found: dict[str, list[str]] = {}
    for stage in re.split(r"^FROM ", IMAGE, flags=re.MULTILINE)[1:]:
        head, *lines = stage.splitlines()
        origin, name = head.split(" AS ")
        found[name] = found.get(origin, []) + lines
    return found


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_an_image_runs_as_nobody_and_has_no_tools_of_the_build(name: str) -> None:
    assert list(stages())[-1] == "cpu", "what is built without --target"
    lines = stages()[name]
    words = [line.split()[0] for line in lines if line[:1].isalpha()]
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 10001:10001"
    assert {"HEALTHCHECK", "STOPSIGNAL", "VOLUME", "ENTRYPOINT"} <= set(words)
    copied = [line for line in lines if line.startswith("COPY")]
    assert copied == [f"COPY --from={name}-install /opt/deltic /opt/deltic"]
    assert not any("pip" in line for line in lines if line.startswith("RUN"))


def test_the_unit_is_one() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    # It also looks for the program, which is not installed.
    text = UNIT.replace("/opt/deltic/bin/deltic", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "deltic.service").write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", f"{folder}/deltic.service"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "deltic.service" not in done.stderr, done.stderr


@pytest.mark.parametrize(("state", "is_well"), [("ready", True), ("starting", False)])
def test_the_health_check_tells(state: Any, is_well: bool) -> None:
    (line,) = re.findall(r"^HEALTHCHECK [^\[]*(\[.*\])$", IMAGE.replace("\\\n", " "), re.MULTILINE)
    program, *words = json.loads(line)
    assert program == "python"
    engine = FakeEngineClient()
    engine.state = state
    with served(make_app(engine)) as url:
        environment = os.environ | {"DELTIC_PORT": url.rpartition(":")[2]}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, timeout=30)
    assert (done.returncode == 0) is is_well, done.stderr
