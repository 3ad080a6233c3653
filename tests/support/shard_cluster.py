"""Small program, its reference (Keras itself), and its shards in this process."""

from __future__ import annotations

import math
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.sharding import make_plan
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.model.program.manifest import Manifest
from nfdt.shard.building import blocks_of
from nfdt.shard.keras_engine import KerasEngine
from nfdt.shard.messages import Gradient
from nfdt.shard.modes import AsynchronousMode
from nfdt.shard.optimizer import build_optimizer
from nfdt.shard.store import ShardStore
from nfdt.update_rules import make_rule

SHAPES = [("a/kernel", (3, 4)), ("a/bias", (4,)), ("b/kernel", (4, 2)), ("b/bias", (2,))]
LAYOUT = ParameterLayout.of(SHAPES)
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion", "Nadam", "Ftrl", "Adamax")


def start_weights(layout=LAYOUT):
    return np.random.default_rng(1).normal(size=layout.size).astype(np.float32)


def gradients(count, seed=2, layout=LAYOUT):
    return np.random.default_rng(seed).normal(size=(count, layout.size)).astype(np.float32)


class Reference:
    """Reference: Keras itself, on one machine."""

    def __init__(self, optimizer, *, constraints=None, exclude=(), layout=LAYOUT, weights=None):
        self.layout = layout
        self.optimizer = optimizer
        self.variables = []
        constraints = constraints or [None] * len(layout.slots)
        values = layout.unflatten(start_weights(layout) if weights is None else weights)
        for slot, value, constraint in zip(layout.slots, values, constraints, strict=True):
            variable = keras.Variable(value, name=slot.name.replace("/", "_"))
            variable.constraint = constraint
            self.variables.append(variable)
        if exclude:
            optimizer.exclude_from_weight_decay(var_list=[self.variables[i] for i in exclude])
        self.exclude = exclude
        optimizer.build(self.variables)

    def apply(self, gradient):
        self.optimizer.apply([keras.ops.convert_to_tensor(g) for g in self.layout.unflatten(gradient)])

    @property
    def weights(self):
        return self.layout.flatten([v.numpy() for v in self.variables])

    @property
    def state(self):
        return {i: v.numpy() for i, v in enumerate(self.optimizer.variables)}

    def manifest(self):
        owners = {v.name: i for i, v in enumerate(self.variables)}
        described = []
        for variable in self.optimizer.variables:
            owner = [i for name, i in owners.items() if variable.name.startswith(name)]
            described.append(
                {"shape": list(variable.shape), "dtype": str(variable.dtype), "variable": owner[0] if owner else -1}
            )
        elementwise = type(self.optimizer).__name__ in ELEMENTWISE
        limited = self.optimizer.clipnorm or self.optimizer.global_clipnorm or any(v.constraint for v in self.variables)
        entries = {
            "layout": self.layout.to_json(),
            "optimizer": keras.saving.serialize_keras_object(self.optimizer),
            "optimizer_variables": described,
            "elementwise": elementwise,
            "divisible": elementwise and not (limited or self.exclude),
            "constraints": [
                c and keras.saving.serialize_keras_object(c) for c in (v.constraint for v in self.variables)
            ],
            "decay": [i not in self.exclude for i in range(len(self.variables))],
        }
        return Manifest(entries)


def rule_spec(rule, **options):
    return AlgorithmSpec(name=rule, update_rule=rule, **options)


def make_engine(manifest, weights, *, rule="plain", index=0, shards=1, state=None, custom_objects=None, **options):
    plan = make_plan(manifest, index, shards)
    part = weights[plan.start : plan.start + plan.layout.size]
    built = build_optimizer(manifest, plan, part, custom_objects)
    if state:
        built.load(state)
    blocks = blocks_of(manifest, manifest.layout.cut(shards)[index])
    return KerasEngine(built, make_rule(rule_spec(rule, **options), built.traits, blocks))


def joined(parts, shape):
    """Return one optimizer variable, which is in parts or the same on all shards."""
    return np.concatenate([part.reshape(-1) for part in parts])[: math.prod(shape)].reshape(shape)


class Cluster:
    """All shards of a program, which get all pushes in the same order."""

    def __init__(
        self,
        reference,
        *,
        rule="plain",
        shards=1,
        mode=AsynchronousMode,
        overlap=0,
        backup_format="exact",
        warm=False,
        **options,
    ):
        manifest = reference.manifest()
        self.reference = reference
        state = reference.state if warm else None
        plans = [make_plan(manifest, i, shards) for i in range(shards)]
        self.layout = reference.layout
        self.bounds = [slice(p.start, p.start + p.layout.size) for p in plans]
        made = [
            make_engine(manifest, reference.weights, rule=rule, index=i, shards=shards, state=state, **options)
            for i in range(shards)
        ]
        fields = {"mode": mode, "overlap": overlap, "backup_format": backup_format}
        self.stores = [ShardStore(engine, **fields) for engine in made]
        self.sequence = {}

    def pull(self, worker="w"):
        return np.concatenate([s.pull(worker).weights for s in self.stores])

    def push(self, gradient, worker="w", **fields):
        self.sequence[worker] = self.sequence.get(worker, 0) + 1
        fields = {"sequence": self.sequence[worker], **fields}
        parts = [np.array(gradient[b]) for b in self.bounds]
        want = fields.pop("want_weights", True)
        return [
            s.push(worker, Gradient(values=g, **fields), want_weights=want)
            for s, g in zip(self.stores, parts, strict=True)
        ]

    @property
    def weights(self):
        return np.concatenate([s.read()[0] for s in self.stores])

    @property
    def state(self):
        found = {}
        for store in self.stores:
            for index, value in store.read()[1].items():
                found.setdefault(index, []).append(value)
        return {index: joined(parts, self.reference.state[index].shape) for index, parts in found.items()}


def start_again(store, worker):
    """Free what a store keeps for a worker, and let the next test use its name."""
    store.forget(worker)
    getattr(store, "_dense", store)._backups._gone.discard(worker)
