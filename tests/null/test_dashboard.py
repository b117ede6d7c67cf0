"""The dashboard and the alerts of deploy/: each names metrics and labels that /metrics has, and a section that says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.null.test_docs import anchors
from tests.null.test_metrics import exposition

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to each sample."""


def told() -> dict[str, set[str]]:
    """The labels of each sample that /metrics can have, by its name; `up` is Prometheus' own."""
    golden = (ROOT / "tests" / "golden" / "metrics.txt").read_text()
    of: dict[str, set[str]] = defaultdict(set, up=set())
    for text in (golden, exposition().text().decode()):  # the golden file leaves out the process
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                of[sample.name] |= sample.labels.keys()
                if family.type == "histogram":
                    of[family.name + "_bucket"] |= sample.labels.keys() | {"le"}
    return of


TOLD = told()


def plain(expression: str) -> str:
    """A query without Grafana's variables."""
    return re.sub(r"\$(__rate_interval|__range|__interval)\b", "5m", expression)


def check(expression: str) -> set[str]:
    """The labels that the result of a query has. Fails at a metric, or a label, that there is not."""

    def labels(node: Any) -> set[str]:
        match type(node).__name__:
            case "VectorSelector":
                assert node.name in TOLD, f"no metric {node.name}: {expression}"
                known = TOLD[node.name] | OF_PROMETHEUS
                unknown = {matcher.name for matcher in node.matchers.matchers} - known
                assert not unknown, f"{node.name} has no labels {unknown}"
                return known
            case "MatrixSelector":
                return labels(node.vector_selector)
            case "ParenExpr":
                return labels(node.expr)
            case "Call":
                found = [labels(argument) for argument in node.args]
                return set().union(*found) - ({"le"} if node.func.name == "histogram_quantile" else set())
            case "AggregateExpr":
                known = labels(node.expr)
                by = set(node.modifier.labels) if node.modifier else set()
                assert by <= known, f"no labels {by - known}: {expression}"
                return by
            case "BinaryExpr":
                sides = [labels(side) for side in (node.lhs, node.rhs) if type(side).__name__ != "NumberLiteral"]
                if len(sides) == 2:
                    matching = node.modifier.matching if node.modifier else None
                    on = set(re.findall(r"\w+", str(matching).partition("(")[2])) if matching else set.union(*sides)
                    assert on <= sides[0] & sides[1], f"its sides do not match: {expression}"
                return set.union(*sides)
            case "NumberLiteral":
                return set()
            case kind:
                raise AssertionError(f"{kind}: {expression}")

    return labels(promql.parse(plain(expression)))


def panels(of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in of["panels"]:
        yield panel
        if panel["type"] == "row":
            yield from panels(panel)


PANELS = list(panels(DASHBOARD))
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]


@pytest.mark.parametrize("panel", SHOWN, ids=lambda panel: panel["title"])
def test_a_panel_shows_what_the_server_tells(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        known = check(target["expr"])
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= known, f"the legend has {shown - known}: {target['expr']}"
        assert known - shown <= {"job", "instance"}, f"lines cannot be told apart by {known - shown}: {target['expr']}"


def test_the_dashboard_can_be_read() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids) and len({panel["title"] for panel in PANELS}) == len(PANELS)
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__range", "__interval", "__all"}
    assert used == variables.keys()
    for name in variables.keys() - {"datasource"}:
        query = variables[name]["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label == name and label in check(metric)
    for note in DASHBOARD["annotations"]["list"]:
        assert set(re.findall(r"{{(\w+)}}", note["titleFormat"])) <= check(note["expr"])
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not own & cells, f"{panel['title']} lies on another"
        cells |= own


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_about_what_the_server_tells(rule: dict[str, Any]) -> None:
    known = check(rule["expr"])
    assert rule["labels"].keys() == {"severity"} and rule["labels"]["severity"] in ("critical", "warning", "info")
    summary = rule["annotations"]["summary"]
    assert summary.endswith(".") and set(re.findall(r"\$labels\.(\w+)", summary)) <= known
    page, section = rule["annotations"]["runbook"].split("#")
    assert section == rule["alert"].lower() and section in anchors((ROOT / page).read_text())


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    sections = re.findall(r"^### (Deltic\w+)$", (ROOT / "docs" / "operating.md").read_text(), re.M)
    assert sections == [rule["alert"] for rule in RULES]


FIRING = {
    "DelticDown": ({'up{job="deltic",instance="a"}': "0x60"}, "10m"),
    "DelticNotReady": ({'deltic_engine_ready{model="m",instance="a"}': "0x60"}, "20m"),
    "DelticEngineRestarts": ({'deltic_engine_restarts_total{model="m"}': "0x10 1x50"}, "20m"),
    "DelticErrors": (
        {
            'deltic_http_responses_total{code="500",route="/v1/completions"}': "0+1x60",
            'deltic_http_responses_total{code="200",route="/v1/completions"}': "0+20x60",
        },
        "30m",
    ),
    "DelticRefuses": (
        {
            'deltic_http_responses_total{code="429",route="/v1/completions"}': "0+10x60",
            'deltic_http_responses_total{code="200",route="/v1/completions"}': "0+20x60",
        },
        "30m",
    ),
    "DelticQueues": ({'deltic_sequences_waiting{model="m"}': "3x60"}, "30m"),
    "DelticTimeouts": (
        {
            'deltic_sequences_finished_total{finish_reason="queue_timeout",model="m"}': "0+1x60",
            'deltic_sequences_finished_total{finish_reason="stop",model="m"}': "0+3x60",
        },
        "40m",
    ),
    "DelticRecomputes": ({'deltic_recomputed_sequences_total{model="m"}': "0x10 1x50"}, "20m"),
    "DelticSpeechLate": (
        {
            'deltic_speech_continuous_total{model="m"}': "0+3x60",
            'deltic_speech_underrun_seconds_count{model="m"}': "0+4x60",
        },
        "40m",
    ),
    "DelticDescriptors": (
        {'process_open_fds{job="deltic"}': "95x60", 'process_max_fds{job="deltic"}': "100x60"},
        "20m",
    ),
    "DelticVersionsDiffer": (
        {f'deltic_build_info{{job="deltic",instance="{v}",model="m",version="{v}"}}': "1x120" for v in ("1", "2")},
        "100m",
    ),
}
"""Series of a minute's samples, and when the alert has to be there."""


def test_alerts_come_when_they_should_and_not_before(tmp_path: Path) -> None:
    """By Prometheus' own promtool."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool here: apt install prometheus")
    count = 'count by (alertname) (ALERTS{{alertstate="firing",alertname="{}"}}) > bool 0'
    tests = []
    for name, (series, at) in FIRING.items():
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1}]
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": one, "values": values} for one, values in series.items()],
                "promql_expr_test": [
                    {"expr": count.format(name), "eval_time": at, "exp_samples": samples},
                    {"expr": count.format(name), "eval_time": "1m", "exp_samples": []},
                ],
            }
        )
    rules = ROOT / "deploy" / "alerts.yaml"
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    for command in (["check", "rules", str(rules)], ["test", "rules", str(tmp_path / "tests.yaml")]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
