"""Models of KerasHub and KerasRS, with random weights: on a worker they get the weights that plain Keras gives them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.scripts import answer

pytestmark = [
    pytest.mark.skipif(find_spec("keras_hub") is None, reason="scripts/setup could not install KerasHub"),
    pytest.mark.processes,
]

SCRIPT = """
import json
import keras
import keras_hub
import keras_rs
import numpy as np
import nfdt

WORDS = "the quick brown fox good bad".split()
TEXTS = np.array(["the quick good fox", "bad fox", "the bad brown fox", "good fox"] * 8)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SIZES = dict(num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=8, dropout=0.0)

def text_classifier():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=vocabulary)
    backbone = keras_hub.models.BertBackbone(vocabulary_size=len(vocabulary), **SIZES)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
    return model, LOGITS, (TEXTS, np.array([1, 0, 0, 1] * 8))

def causal_lm():
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyzĠ", "th"])}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["t h"])
    backbone = keras_hub.models.GPT2Backbone(vocabulary_size=len(vocabulary), **SIZES)
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)
    model.backbone.enable_lora(2)
    return model, LOGITS, (TEXTS,)

class Towers(keras.Model):
    def __init__(self):
        super().__init__()
        self.users, self.movies = keras.layers.Embedding(9, 4), keras.layers.Embedding(7, 4)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)

    def build(self, shape):
        self.users.build(shape)
        self.movies.build(shape)
        self.retrieval.candidate_embeddings = self.movies.embeddings
        self.retrieval.build((None, 4))
        self.built = True

    def call(self, inputs, training=False):
        users = self.users(inputs)
        return users if training else self.retrieval(users)

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        scores = keras.ops.matmul(y_pred, keras.ops.transpose(self.movies(y)))
        own = keras.ops.eye(keras.ops.shape(scores)[0])
        return keras.ops.mean(keras.losses.categorical_crossentropy(own, scores, from_logits=True))

def two_towers():
    draw = np.random.default_rng(0)
    model = Towers()
    model.build((None,))
    return model, None, (draw.integers(0, 9, 32), draw.integers(0, 7, 32))

def fit(model, loss, data, before):
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    model.compile(keras.optimizers.SGD(0.5), loss)
    model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [np.array(variable) for variable in model.variables]

cases, out = {}, {}
for make in (text_classifier, causal_lm, two_towers):
    keras.utils.set_random_seed(1)
    model, loss, data = make()
    before = [np.array(variable) for variable in model.variables]
    cases[make.__name__] = model, loss, data, before, fit(model, loss, data, before)
with nfdt.session(workers=1, algorithm="bsp"):
    there = {name: fit(*case[:4]) for name, case in cases.items()}
for name, (model, _, _, before, plain) in cases.items():
    distributed = there[name]
    moved = max(float(np.abs(a - b).max()) for a, b in zip(plain, before, strict=True))
    apart = max(float(np.abs(a - b).max()) for a, b in zip(plain, distributed, strict=True))
    out[name] = dict(moved=moved, apart=apart, where=model.history.nfdt["where"])
print()
print(json.dumps(out))
"""


@pytest.mark.long
@pytest.mark.feature(
    "KerasHub: text classifier with its preprocessor",
    "KerasHub: causal language model with its preprocessor, and LoRA",
    "KerasRS: retrieval with two towers",
    area="Models",
)
def test_models_of_libraries_train_as_in_plain_keras(run_script):
    found = answer(run_script(SCRIPT))
    assert found.keys() == {"text_classifier", "causal_lm", "two_towers"}
    for name, one in found.items():
        assert one["where"] == "cluster", name
        assert one["apart"] < 1e-5 < 1e-4 < one["moved"], (name, one)
