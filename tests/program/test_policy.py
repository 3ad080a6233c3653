"""Content that a job without code must not contain."""

import keras
import numpy as np
import pytest
from keras import layers

from nfdt.core.errors import PolicyRefused, ProtocolError
from nfdt.model.program.pack import pack
from nfdt.model.program.policy import check_policy
from nfdt.model.program.unpack import unpack


@pytest.fixture(scope="module")
def program():
    batch = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    model = keras.Sequential([layers.Dense(2, "relu", kernel_regularizer="l2"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 5)), "mse", metrics=["mae"])
    return pack(model, batch)


EVIL = [
    {"module": "keras.layers", "class_name": "Lambda", "config": {}},
    {"module": "keras.layers", "class_name": "TFSMLayer", "config": {"filepath": "x"}},
    {"module": "keras.layers", "class_name": "TorchModuleWrapper", "config": {}},
    {"module": "builtins", "class_name": "function", "config": "eval"},
    {"module": "os", "class_name": "function", "config": "system"},
    {"module": "os", "class_name": "system", "config": {}},
    {"module": None, "class_name": "Mine", "config": {}, "registered_name": "job>Mine"},
    {"module": "keras.layers", "class_name": "Dense", "config": {}, "registered_name": "job>Dense"},
    {"module": "keras.utils", "class_name": "get_file", "config": {}},
    {"module": "keras.models", "class_name": "load_model", "config": {}},
    {"module": "keras.src.saving.saving_lib", "class_name": "H5IOStore", "config": {}},
    {"module": "keras.src.ops.numpy", "class_name": "np", "config": {}},
    {"class_name": "__lambda__", "config": {"value": []}},
    {"class_name": "__typespec__", "config": []},
    {"class_name": ["Dense"], "module": "keras.layers", "config": {}},
    {"vocabulary": "/etc/passwd"},
    "x" * 1_000_001,
]


@pytest.mark.parametrize("evil", EVIL, ids=str)
@pytest.mark.parametrize("section", ["model", "compile", "optimizer", "constraints"])
def test_what_is_not_on_the_list_is_refused_wherever_it_stands(evil, section, program):
    check_policy(program.manifest)
    held = program.manifest.entries[section]
    manifest = program.manifest.replaced(**{section: [held, {"config": {"deep": [evil]}}]})
    with pytest.raises(PolicyRefused):
        check_policy(manifest)
    with pytest.raises(PolicyRefused):
        unpack(manifest, program.artifacts.__getitem__, allow_code=False)


LAYER = {"module": "keras.layers", "class_name": "Dense", "config": {"units": 1}}
SCHEDULE = {"module": "keras.optimizers.schedules", "class_name": "CosineDecay", "config": {}}
FUNCTION = {"module": "builtins", "class_name": "function", "registered_name": "function"}


@pytest.mark.parametrize(
    "key", ["kernel_constraint", "bias_initializer", "activity_regularizer", "learning_rate", "inner_optimizer"]
)
@pytest.mark.parametrize(
    "other", [LAYER, {**LAYER, "module": "keras.losses", "class_name": "MeanSquaredError"}], ids=str
)
def test_a_layer_or_loss_stands_for_no_other_kind(key, other, program):
    with pytest.raises(PolicyRefused, match=key):
        check_policy(program.manifest.replaced(model=[LAYER, {"config": {key: other}}]))


@pytest.mark.parametrize("section", ["optimizer", "constraints"])
def test_a_schedule_is_neither_an_optimizer_nor_a_constraint(section, program):
    with pytest.raises(PolicyRefused, match=section):
        check_policy(program.manifest.replaced(**{section: [SCHEDULE]}))


@pytest.mark.parametrize("name", ["get", "deserialize", "serialize"])
def test_functions_that_make_objects_are_no_activations(name, program):
    check_policy(program.manifest.replaced(model={**FUNCTION, "config": "relu"}))
    with pytest.raises(PolicyRefused):
        check_policy(program.manifest.replaced(model={**FUNCTION, "config": name}))


def test_depth_is_limited(program):
    deep = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(PolicyRefused, match="levels"):
        check_policy(program.manifest.replaced(model=deep))


@pytest.mark.parametrize("layer", [layers.Lambda(lambda x: x), layers.Dense(1, activation=lambda x: x)])
def test_code_needs_permission(layer, batch):
    model = keras.Sequential([layer, layers.Dense(1)])
    model.compile("sgd", "mse")
    packed = pack(model, batch)
    assert packed.code
    with pytest.raises(PolicyRefused, match="--allow-code"):
        unpack(packed.manifest, packed.artifacts.__getitem__, allow_code=False)


@pytest.mark.parametrize("change", [{"kind": "config"}, {"kind": "config", "by_value": None}])
def test_code_that_claims_to_be_configuration_is_refused(change, batch):
    model = keras.Sequential([layers.Dense(1, activation=lambda x: x)])
    model.compile("sgd", "mse")
    packed = pack(model, batch)
    with pytest.raises((PolicyRefused, ProtocolError)):
        unpack(packed.manifest.replaced(**change), packed.artifacts.__getitem__, allow_code=False)
