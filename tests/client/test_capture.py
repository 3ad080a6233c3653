"""Capture of data as in Keras' own fit: the reference is the output of Keras' adapters."""

from __future__ import annotations

import numpy as np
import pytest
from nfdt_client.capture import bind, capture, check_batch
from nfdt_client.options import resolve
from nfdt_client.specify import specify
from nfdt_client.training_data import Arrays, Stream

from nfdt.core.errors import CaptureError, UsageError
from nfdt.core.program.manifest import Manifest

keras = pytest.importorskip("keras")
pandas = pytest.importorskip("pandas")
tf = pytest.importorskip("tensorflow")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 3)), RNG.integers(0, 2, size=(10, 1))
W = np.arange(10.0)


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def fit_arguments(model):
    return lambda *args, **kwargs: bind(keras.Model.fit, model, args, kwargs)


@pytest.fixture
def read(model, fit_arguments):
    return lambda *args, **kwargs: capture(model, fit_arguments(*args, **kwargs), resolve({}))


def keras_batches(**arguments):
    """Return the batches that Keras' train_step would see in one epoch without shuffling."""
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    iterator = TFEpochIterator(distribute_strategy=tf.distribute.get_strategy(), shuffle=False, **arguments)
    for _, _, batches in iterator:
        try:
            yield next(batches)
        except StopIteration:
            return


def same(got, want):
    keras.tree.assert_same_structure(got, want)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(want), strict=True):
        b = b.numpy()
        assert a.shape == b.shape
        assert a.dtype == b.dtype or a.dtype.kind in "OSU"
        assert np.array_equal(a, b)


FRAME = pandas.DataFrame(X, columns=list("abc"))
ARRAYS = {
    "numpy float64": {"x": X, "y": Y},
    "float32 and weights": {"x": X.astype("float32"), "y": Y, "sample_weight": W},
    "only x": {"x": X},
    "tensors": {"x": tf.constant(X), "y": tf.constant(Y)},
    "dictionary": {"x": {"a": X, "b": Y}, "y": Y},
    "list": {"x": [X, Y], "y": [Y, Y]},
    "only a list": {"x": [X, Y]},
    "frame and series": {"x": FRAME, "y": FRAME["a"]},
    "class weights": {"x": X, "y": Y, "class_weight": {0: 1.0, 1: 5.0}},
    "half precision": {"x": X.astype("float16"), "y": Y},
    "strings": {"x": np.array(["a", "bc"] * 5, dtype=object), "y": Y},
    "batch size": {"x": X, "y": Y, "batch_size": 4},
    "weights for two outputs": {"x": X, "y": {"a": Y, "b": Y}, "sample_weight": W},
}


@pytest.mark.parametrize("arguments", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_are_what_keras_would_train_on(read, arguments):
    data = read(**arguments).train
    assert isinstance(data, Arrays)
    start = 0
    for want in keras_batches(**arguments):
        rows = len(keras.tree.flatten(want)[0])
        same(keras.tree.map_structure(lambda a, s=start, n=rows: a[s : s + n], data.pytree), want)
        start += rows
    assert start == data.samples == 10


def generator(dtype="float64"):
    for start in range(0, 10, 4):
        yield X[start : start + 4].astype(dtype), Y[start : start + 4]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * 4 : index * 4 + 4], Y[index * 4 : index * 4 + 4]


def sparse_rows():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    return scipy_sparse.csr_matrix(X)


STREAMS = {
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)},
    "dataset with class weights": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4),
        "class_weight": {0: 1.0, 1: 5.0},
    },
    "generator": lambda: {"x": generator()},
    "PyDataset": lambda: {"x": Batches()},
    "endless dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat(),
        "steps_per_epoch": 5,
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
def test_streams_are_what_keras_would_train_on(read, make):
    captured = read(**make(), shuffle=False)
    captured.read_here("a test compares the batches")
    assert isinstance(captured.train, Stream)
    want = list(keras_batches(**make()))
    same(captured.sample_batch(), want[0])
    got = list(captured.train.epoch())
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        same(a, b)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_generator_goes_on_over_epochs(read):
    def count():
        for i in range(100):
            yield np.full((2, 3), i), np.zeros((2, 1))

    train = read(count(), steps_per_epoch=3, shuffle=False).train
    train.first()
    firsts = [[int(batch[0][0, 0]) for batch in train.epoch()] for _ in range(3)]
    assert firsts == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_dataset_begins_anew_each_epoch_and_peeking_loses_nothing(read):
    seen = []

    def once():
        for i in range(3):
            seen.append(i)
            yield np.full((2, 3), i, "float32"), np.zeros((2, 1), "float32")

    spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))
    with pytest.warns(UserWarning, match="shuffle"):
        train = read(tf.data.Dataset.from_generator(once, output_signature=spec)).train
    assert train.batches is None
    train.first()
    for _ in range(2):
        with pytest.warns(UserWarning, match="ran out of data"):
            assert [int(batch[0][0, 0]) for batch in train.epoch()] == [0, 1, 2]
    assert seen == [0, 1, 2, 0, 1, 2]


def test_sparse_rows_are_fed_densely(read):
    captured = read(sparse_rows(), Y, batch_size=4, shuffle=False)
    got = list(captured.train.epoch())
    assert np.allclose(np.concatenate([batch[0] for batch in got]), X, atol=1e-6)
    assert {type(batch[0]) for batch in got} == {np.ndarray}


def test_validation_split_takes_the_last_rows(read):
    captured = read(X, Y, validation_split=0.3)
    assert (captured.train.samples, captured.validation.samples) == (7, 3)
    assert np.array_equal(captured.train.pytree[0], X[:7].astype("float32"))
    assert np.array_equal(captured.validation.pytree[0], X[7:].astype("float32"))


def test_validation_arrays_go_with_the_job_others_stay(read):
    captured = read(X, Y, validation_data=(X, Y), validation_batch_size=5)
    assert captured.validation.batch_size == 5
    assert captured.local_validation is None
    captured = read(X, Y, validation_data=tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    assert captured.validation is None
    assert captured.local_validation is not None


def test_validation_steps_cut_the_validation_data(read):
    captured = read(X, Y, batch_size=2, validation_data=(X, Y), validation_steps=3)
    assert captured.validation.samples == 6


def test_callbacks_that_watch_the_evaluation_keep_it_here(read):
    class Watcher(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            pass

    assert read(X, Y, validation_data=(X, Y), callbacks=[Watcher()]).local_validation is not None
    assert read(X, Y, validation_data=(X, Y), callbacks=[keras.callbacks.History()]).local_validation is None


def test_steps_without_batch_size_divide_the_data(read):
    captured = read(X, Y, steps_per_epoch=3)
    assert captured.batch_size == 4
    assert captured.steps_per_epoch is None


def test_more_steps_than_batches_are_cut_with_a_warning(read):
    with pytest.warns(UserWarning, match="ran out of data"):
        captured = read(X, Y, batch_size=5, steps_per_epoch=7)
    assert captured.steps_per_epoch is None
    assert read(X, Y, batch_size=1, steps_per_epoch=7).steps_per_epoch == 7


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ({"x": None}, "Received: None"),
        ({"x": X[:0], "y": Y[:0]}, "at least one sample"),
        ({"x": X, "y": Y[:9]}, "same number of samples"),
        ({"x": X, "y": Y, "sample_weight": W, "class_weight": {0: 1}}, "class_weight"),
        ({"x": tf.data.Dataset.range(3), "y": Y}, "should not be passed"),
        ({"x": object(), "y": Y}, "Unrecognized data type"),
        ({"x": X[:1], "y": Y[:1], "validation_split": 0.5}, "not sufficient"),
        ({"x": iter(())}, "Unrecognized data type"),
        ({"x": (batch for batch in ())}, "at least one batch"),
        ({"x": X, "y": Y, "epochs": -1}, "epochs"),
    ],
)
def test_bad_data_are_refused_in_keras_words(read, arguments, needle):
    with pytest.raises(UsageError, match=needle):
        read(**{"shuffle": False, **arguments}).sample_batch()


def test_ragged_tensors_are_refused_with_the_remedy(read):
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(CaptureError, match="to_tensor"):
        read(ragged, Y[:2])


def test_an_empty_dataset_is_refused(read):
    dataset = tf.data.Dataset.from_tensor_slices((X[:0], Y[:0])).batch(2)
    with pytest.raises(UsageError, match="empty"):
        read(dataset, shuffle=False).sample_batch()


def test_wrong_shapes_are_refused_before_anything_is_sent(model):
    check_batch(model, (X[:4].astype("float32"), Y[:4]))
    with pytest.raises(UsageError, match="do not fit"):
        check_batch(model, (X[:4, :2].astype("float32"), Y[:4]))
    classifier = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    classifier.compile("sgd", "categorical_crossentropy")
    with pytest.raises(UsageError, match="do not fit"):
        check_batch(classifier, (X[:4].astype("float32"), np.zeros((4, 3), "float32")))


class Packed:
    manifest = Manifest({"state": "0" * 64})
    artifacts = {}
    code = False


def submission(captured, **options):
    resolved = resolve(options)
    return specify(captured, Packed(), resolved, cluster=resolved.cluster, initial_epoch=0)


def test_the_seed_is_drawn_from_the_user_s_generator(read):
    seeds = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        seeds.append(submission(read(X, Y)).spec.fit.seed)
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize(("shuffle", "want"), [(True, True), (False, False), ("batch", False)])
def test_shuffling_is_keras_shuffling(read, shuffle, want):
    assert submission(read(X, Y, shuffle=shuffle)).spec.fit.shuffle is want


def test_the_job_names_all_its_artifacts(read):
    made = submission(read(X, Y, validation_data=(X, Y), epochs=3, validation_freq=[1, 3]))
    assert set(made.spec.artifacts) == set(made.blobs)
    assert {made.spec.program, *made.spec.train.arrays, *made.spec.validation.arrays} <= set(made.blobs)
    assert made.spec.fit.validation_freq == (1, 3)
    assert made.spec.train.arrays == made.spec.validation.arrays, "equal arrays are sent once"


def test_wrong_arguments_are_python_s_type_error(fit_arguments):
    with pytest.raises(TypeError, match="epoch"):
        fit_arguments(X, Y, epoch=3)
