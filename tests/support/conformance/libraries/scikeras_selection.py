"""Model selection of scikit-learn on SciKeras' wrappers: cross_val_score and GridSearchCV."""

import keras
import numpy as np
from scikeras.wrappers import KerasClassifier, KerasRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score

draw = np.random.default_rng(0)
x = draw.normal(size=(90, 4)).astype("float32")


def network(loss, activation=None, units=4):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1, activation)])
    model.compile(keras.optimizers.SGD(0.02), loss, metrics=["mae"])
    return model


classifier = KerasClassifier(
    network,
    model__loss="binary_crossentropy",
    model__activation="sigmoid",
    epochs=3,
    batch_size=4,
    verbose=0,
    random_state=0,
)
print(cross_val_score(classifier, x, (x[:, 0] > 0).astype(int), cv=3))

regressor = KerasRegressor(
    network, model__loss="mse", model__units=4, epochs=3, batch_size=4, verbose=0, random_state=0
)
search = GridSearchCV(regressor, {"model__units": [2, 6]}, cv=2)
search.fit(x, x[:, 0] - x[:, 1])
print(search.best_params_, search.predict(x[:3]).shape)
