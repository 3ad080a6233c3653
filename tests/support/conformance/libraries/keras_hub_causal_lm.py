"""A causal language model of KerasHub: it learns from strings, alone and with LoRA, and writes text."""

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
LETTERS = "abcdefgh"
VOCABULARY = {token: number for number, token in enumerate(["<|endoftext|>", "!", "Ġ", *LETTERS, "ab", "cd", "Ġa"])}
tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=VOCABULARY, merges=["a b", "c d", "Ġ a"])
preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12)
backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=len(VOCABULARY),
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
    max_sequence_length=12,
    dropout=0.0,
)
texts = np.array(["ab cd ab cd", "cd ab cd ab", "ab ab ab ab", "efgh efgh"] * 16)


def train(model):
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),  # Adam makes steps of rounding errors where gradients are 0
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras_hub.metrics.Perplexity(from_logits=True, name="perplexity")],
    )
    model.fit(texts, batch_size=16, epochs=3, verbose=0)


model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)
train(model)
print(model.generate("ab", max_length=8))

model.backbone.enable_lora(rank=2)
before = [np.array(v) for v in model.non_trainable_variables]
train(model)
assert all(np.array_equal(a, np.array(v)) for a, v in zip(before, model.non_trainable_variables, strict=True))
assert len(model.trainable_variables) < len(model.variables) / 2
