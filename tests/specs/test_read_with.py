"""Effect of options: declared with them, and equal to what the components read."""

from __future__ import annotations

import pytest

from nfdt.consistency import POLICIES
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import ClusterSpec, find_idle, resolve_algorithm, resolve_cluster
from nfdt.core.specs.presets import AXES, PRESETS
from nfdt.core.specs.read_with import ReadWith
from nfdt.transport.choice import make_choice
from nfdt.update_rules import RULES
from nfdt.update_rules.base import OptimizerTraits
from nfdt.update_rules.blocks import Elements

OPTIONS = {**ClusterSpec.model_fields, **AlgorithmSpec.model_fields}
DECLARED = [(name, item) for name, field in OPTIONS.items() for item in field.metadata if isinstance(item, ReadWith)]


class Reader:
    """Specification that records the fields that are read from it."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec, self.read = spec, set()

    def __getattr__(self, name: str):
        self.read.add(name)
        return getattr(self.spec, name)


def read_by(make, **choice) -> tuple[set[str], AlgorithmSpec]:
    spec = resolve_algorithm("asgd", **choice)
    reader = Reader(spec)
    make(reader)
    return reader.read, spec


def with_effect(spec: AlgorithmSpec, names: set[str]) -> set[str]:
    return names - set(find_idle(spec, resolve_cluster(), names))


@pytest.mark.parametrize("consistency", AXES["consistency"])
def test_a_policy_s_numbers_have_an_effect_with_that_policy_only(consistency):
    read, spec = read_by(POLICIES[consistency], consistency=consistency)
    assert with_effect(spec, {"staleness_bound", "softsync_n"}) == read


@pytest.mark.parametrize("rule", AXES["update_rule"])
def test_a_rule_s_numbers_have_an_effect_with_the_rules_that_read_them(rule):
    read, spec = read_by(lambda spec: RULES[rule](spec, OptimizerTraits(), Elements()), update_rule=rule)
    assert with_effect(spec, {"dc_lambda", "dc_clip", "gap", "dc_decay"}) == read


@pytest.mark.parametrize("codec", AXES["codec"])
def test_a_codec_s_numbers_have_an_effect_with_that_codec_only(codec):
    read, spec = read_by(lambda spec: make_choice(spec, 1000), codec=codec)
    assert with_effect(spec, {"error_budget"}) == read & {"error_budget"}
    assert with_effect(spec, {"top_k"}) == ({"top_k"} if codec == "top-k" else set())


@pytest.mark.parametrize(("name", "condition"), DECLARED, ids=[f"{name}: {item}" for name, item in DECLARED])
def test_what_is_declared_can_be_had(name, condition):
    wanted = {other: values[0] for other, values in condition.choices.items()}
    cluster = resolve_cluster(min_workers=1) if wanted.pop("elastic", False) else resolve_cluster()
    spec = resolve_algorithm("asgd", **wanted)
    assert not find_idle(spec, cluster, [name])


@pytest.mark.parametrize("preset", PRESETS)
def test_to_name_a_preset_s_own_parts_is_no_mistake(preset):
    assert find_idle(resolve_algorithm(preset), resolve_cluster(), PRESETS[preset]) == {}


def test_an_idle_option_s_reason_names_the_choices_with_which_it_has_an_effect():
    idle = find_idle(resolve_algorithm("ddc-asgd"), resolve_cluster(), ["staleness_bound", "workers"])
    assert idle == {
        "staleness_bound": "Expected: consistency='ssp'. Received: consistency='free'. It has one with algorithm='ssp'."
    }
