"""A text classifier of KerasHub, which tokenizes the strings itself, and one without its preprocessor."""

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
WORDS = "the quick brown fox jumped over lazy dog good bad fine poor".split()
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
    keras_hub.models.BertTokenizer(vocabulary=VOCABULARY), sequence_length=8
)
draw = np.random.default_rng(0)
texts = np.array([" ".join(draw.choice(WORDS, 5)) for _ in range(96)])
labels = np.array([int("good" in text or "fine" in text) for text in texts])


def classifier(preprocessor):
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(VOCABULARY),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=8,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),  # Adam makes steps of rounding errors where gradients are 0
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


model = classifier(preprocessor)
model.fit(texts, labels, batch_size=16, epochs=3, validation_split=0.25, verbose=0)
print(model.predict(texts[:4], verbose=0).shape)

keras.utils.set_random_seed(0)
arrays = classifier(None)
arrays.fit(preprocessor(texts), labels, batch_size=16, epochs=3, verbose=0)
