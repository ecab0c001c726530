"""The dashboard shows metrics that exist."""

import json
import re

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mooncake_store import StoreConfig
from mooncake_store.grafana import dashboard
from mooncake_store.metrics import ReportCollector, StoreCollector
from mooncake_store.policy import TenantPolicy

MIB = 1 << 20
METRIC = re.compile(r"mooncake_\w+")
# What stands in braces after a metric, and what a sum is kept apart by.
LABELS = re.compile(r"(mooncake_\w+)\{([^}]*)\}")
BY = re.compile(r"by \(([^)]*)\)")


def samples(world):
    limits = {"": TenantPolicy(quota_bytes=MIB)}
    store = world.store(lend=MIB, config=StoreConfig(tenants=limits))
    store.put("a", b"1")
    store.get("a")
    registry = CollectorRegistry()
    for collector in (ReportCollector(store), StoreCollector(store)):
        registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [sample for family in families for sample in family.samples]


def panels():
    return [panel for panel in json.loads(dashboard())["panels"] if panel["type"] != "row"]


def expressions():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_metric_on_the_dashboard_exists_with_the_labels_it_is_asked_by(world):
    labels = {}
    for sample in samples(world):
        labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    asked = expressions()
    assert len(asked) > 20
    missing = {name for text in asked for name in METRIC.findall(text)} - set(labels)
    assert not missing
    for text in asked:
        names = METRIC.findall(text)
        for name, inside in LABELS.findall(text):
            assert {part.split("=")[0].strip() for part in inside.split(",")} <= labels[name], text
        for inside in BY.findall(text):
            assert {part.strip() for part in inside.split(",")} <= labels[names[0]], text


def test_legends_name_labels_that_are_there(world):
    labels = {}
    for sample in samples(world):
        labels.setdefault(sample.name, set()).update(sample.labels)
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            there = set.union(*(labels[name] for name in METRIC.findall(target["expr"])))
            assert named <= there, target


def test_no_two_panels_overlap():
    places = [panel["gridPos"] for panel in json.loads(dashboard())["panels"]]
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(p["x"] + p["w"] <= 24 for p in places)
