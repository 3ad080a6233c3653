"""Capture of data as in Keras' own fit: the reference is the output of Keras' adapters."""

from __future__ import annotations

import itertools
import random
import warnings

import numpy as np
import pytest
from nfdt_client.capture import capture
from nfdt_client.options import resolve
from nfdt_client.patch import bind
from nfdt_client.program_checks import check_batch
from nfdt_client.specify import specify
from nfdt_client.training_data import Arrays, Stream

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.errors import CaptureError, UsageError
from nfdt.model.backends.contract import to_tensor
from nfdt.model.backends.direct_call import components_of
from nfdt.model.program.manifest import Manifest
from nfdt.model.training.host_batches import as_batch

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
    """Return the batches that Keras' train_step would see in one epoch, without shuffling unless it is asked for."""
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    arguments = {"shuffle": False, **arguments}
    iterator = TFEpochIterator(distribute_strategy=tf.distribute.get_strategy(), **arguments)
    for _, _, batches in iterator:
        try:
            yield next(batches)
        except StopIteration:
            return


def same(got, want):
    keras.tree.assert_same_structure(got, want)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(want), strict=True):
        if isinstance(a, SparseArray | RaggedArray):
            same(components_of(to_tensor(a)), components_of(b))
            continue
        a, b = np.asarray(a), b.numpy()
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


@pytest.mark.feature(
    "NumPy arrays and tensors", "Dictionaries and lists of arrays", "pandas frames and series", "Strings", area="Data"
)
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


class RaggedBatches(Batches):
    def __getitem__(self, index):
        return RAGGED[index * 4 : index * 4 + 4], Y[index * 4 : index * 4 + 4]


def sparse_batches():
    for start in range(0, 10, 4):
        yield SPARSE[start : start + 4], Y[start : start + 4]


SPARSE = pytest.importorskip("scipy.sparse").csr_matrix(np.where(X > 0, X, 0))
RAGGED = tf.ragged.constant([[1.0] * (n % 4) for n in range(10)])


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
    "sparse matrix": lambda: {"x": SPARSE, "y": Y, "batch_size": 4},
    "sparse tensor": lambda: {"x": {"a": tf.sparse.from_dense(X), "b": X}, "y": Y, "batch_size": 4},
    "sparse dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), Y)).batch(4),
    },
    "sparse generator": lambda: {"x": sparse_batches()},
    "ragged tensor": lambda: {"x": RAGGED, "y": Y, "batch_size": 4},
    "ragged in two dimensions": lambda: {"x": tf.RaggedTensor.from_row_splits(RAGGED, [0, 3, 3, 10])},
    "ragged dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((RAGGED, Y)).batch(4)},
    "ragged PyDataset": lambda: {"x": RaggedBatches()},
}


@pytest.mark.feature("Sparse matrices and tensors", "Ragged tensors", "Generators", area="Data")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
def test_streams_are_what_keras_would_train_on(read, make):
    captured = read(**make(), shuffle=False)
    captured.read_here("a test compares the batches")
    assert isinstance(captured.train, Stream)
    want = list(keras_batches(**make()))
    same(captured.train.first(), want[0])
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


def test_sparse_and_ragged_validation_data_stay(read):
    for x in (SPARSE, RAGGED):
        captured = read(X, Y, validation_data=(x, Y))
        assert captured.validation is None
        assert captured.local_validation is not None


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


@pytest.mark.feature("`validation_steps`", area="Fit, evaluate and predict")
def test_validation_steps_cut_the_validation_data(read):
    captured = read(X, Y, batch_size=2, validation_data=(X, Y), validation_steps=3)
    assert captured.validation.samples == 6


def test_validation_is_limited_as_in_keras(read, model):
    try:
        keras.config.set_max_steps_per_epoch(2)
        assert read(X, Y, batch_size=2, validation_data=(X, Y)).validation.samples == 4
        assert read(X, Y, batch_size=2, validation_data=(X, Y), validation_steps=3).validation.samples == 4
        assert read(X, Y, batch_size=2, validation_data=(X, Y), validation_steps=1).validation.samples == 2
        assert read(X, Y, validation_data=batches_of("PyDataset", 5)).validation.batches == 2
    finally:
        keras.config.set_max_steps_per_epoch(None)


def test_validation_ends_with_whole_executions(read, model):
    try:
        model.steps_per_execution = 2
        assert read(X, Y, batch_size=2, validation_data=(X, Y), validation_steps=3).validation.samples == 8
        assert read(X, Y, batch_size=2, validation_data=(X, Y), validation_steps=5).validation.samples == 10
    finally:
        model.steps_per_execution = 1


def test_callbacks_that_watch_the_evaluation_keep_it_here(read):
    class Watcher(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            pass

    assert read(X, Y, validation_data=(X, Y), callbacks=[Watcher()]).local_validation is not None
    assert read(X, Y, validation_data=(X, Y), callbacks=[keras.callbacks.History()]).local_validation is None


class OwnTest(keras.Sequential):
    """Model that wraps Keras' function of the validation's batches."""

    def make_test_function(self, force=False):
        return super().make_test_function(force)


@pytest.mark.feature(
    "Custom `make_train_function`", area="Models", status="refused", note="use `train_step` and callbacks"
)
def test_a_train_function_of_the_script_is_refused_by_name_with_the_remedy(fit_arguments):
    class Wrapped(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    refused = Wrapped([keras.Input((3,)), keras.layers.Dense(1)])
    assigned = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assigned.make_train_function = lambda force=False: None
    for model in (refused, assigned):
        model.compile("sgd", "mse")
        with pytest.raises(CaptureError, match=rf"make_train_function.*{type(model).__name__}.*train_step\(\)"):
            capture(model, fit_arguments(X, Y), resolve({}))


def test_a_model_with_a_test_function_of_its_own_is_validated_here(fit_arguments):
    model = OwnTest([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    captured = capture(model, fit_arguments(X, Y, validation_data=(X, Y)), resolve({}))
    assert captured.validation is None
    assert captured.local_validation is not None


def test_steps_without_batch_size_divide_the_data(read):
    captured = read(X, Y, steps_per_epoch=3)
    assert (captured.train.batch_size, captured.steps_per_epoch) == (4, 3)
    assert captured.steps_of_job(resolve({})) is None


def test_the_steps_of_an_epoch_are_whole_executions(read, model):
    try:
        model.steps_per_execution = 4
        assert read(X, Y, batch_size=1, steps_per_epoch=6).steps_per_epoch == 8
        assert read(X, Y, batch_size=1, steps_per_epoch=6).steps(resolve({})) == 6
    finally:
        model.steps_per_execution = 1


def test_the_steps_of_an_epoch_are_limited_as_in_keras(read):
    try:
        keras.config.set_max_steps_per_epoch(3)
        with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 3"):
            assert read(X, Y, batch_size=1).steps_per_epoch == 3
    finally:
        keras.config.set_max_steps_per_epoch(None)


def batches_of(kind, count):
    """Return data of numbered batches of two rows."""
    batches = [(np.full((2, 3), i, "float32"), np.zeros((2, 1), "float32")) for i in range(count)]

    class Numbered(keras.utils.PyDataset):
        def __len__(self):
            return count

        def __getitem__(self, index):
            return batches[index]

    pipeline = tf.data.Dataset.from_tensor_slices(tuple(map(np.stack, zip(*batches, strict=True))))
    kinds = {"PyDataset": Numbered(), "tf.data": pipeline, "unknown length": pipeline.filter(lambda x, y: True)}
    return kinds.get(kind) or (batch for batch in batches)


def warnings_of(epoch):
    """Return the batches of an epoch, and how often it warned that data are missing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = list(epoch())
    return seen, sum("ran out of data" in str(warning.message) for warning in caught)


def keras_epochs(x, epochs, size, steps):
    """Return the batches of each epoch of Keras' ``fit``, by number, and the warnings."""
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    options = {"steps_per_execution": size, "steps_per_epoch": steps, "shuffle": False}
    iterator = TFEpochIterator(x=x, distribute_strategy=tf.distribute.get_strategy(), **options)
    iterator.reset()

    def epoch():
        with iterator.catch_stop_iteration():
            for _, _, batches in iterator:
                execution = list(itertools.islice(batches, size))  # as the train function does
                yield from (int(x[0, 0]) for x, _ in execution)
                if not execution:
                    raise tf.errors.OutOfRangeError(None, None, "")

    return [warnings_of(epoch) for _ in range(epochs)]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*shuffle=True:UserWarning")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("count", "steps"), [(4, None), (4, 3), (4, 4), (4, 6), (5, 2), (5, 6), (1, None), (6, 2)])
@pytest.mark.parametrize("kind", ["generator", "PyDataset", "tf.data", "unknown length"])
def test_streamed_epochs_have_the_batches_and_warnings_of_keras(read, model, kind, count, steps, size):
    try:
        model.steps_per_execution = size
        train = read(batches_of(kind, count), steps_per_epoch=steps, shuffle=False).choice.data
    finally:
        model.steps_per_execution = 1
    stream = getattr(train, "stream", train)
    stream.first()
    got = [warnings_of(lambda: (int(x[0, 0]) for x, _ in stream.epoch())) for _ in range(5)]
    assert got == keras_epochs(batches_of(kind, count), 5, size, steps)


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
    with pytest.raises(ValueError, match=needle):
        read(**{"shuffle": False, **arguments}).train.first()


def test_an_empty_dataset_is_refused(read):
    dataset = tf.data.Dataset.from_tensor_slices((X[:0], Y[:0])).batch(2)
    with pytest.raises(UsageError, match="empty"):
        read(dataset, shuffle=False).train.first()


def test_wrong_shapes_are_refused_before_anything_is_sent(model):
    check_batch(model, (X[:4].astype("float32"), Y[:4]))
    with pytest.raises(UsageError, match="do not fit"):
        check_batch(model, (X[:4, :2].astype("float32"), Y[:4]))
    classifier = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    classifier.compile("sgd", "categorical_crossentropy")
    with pytest.raises(UsageError, match="do not fit"):
        check_batch(classifier, (X[:4].astype("float32"), np.zeros((4, 3), "float32")))


def test_sparse_rows_are_checked_and_ragged_ones_left_to_the_workers():
    model = keras.Sequential([keras.Input((3,), sparse=True), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    check_batch(model, as_batch((SPARSE, Y)))
    with pytest.raises(UsageError, match="do not fit"):
        check_batch(model, as_batch((SPARSE[:, :2], Y)))
    check_batch(model, as_batch((RAGGED, Y)))


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


@pytest.mark.parametrize(
    "layer", [AddsLoss(), keras.layers.Dense(1, kernel_regularizer="l2")], ids=["add_loss", "regularizer"]
)
def test_a_loss_of_a_layer_is_enough(layer):
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile("sgd")
    check_batch(model, X[:4].astype("float32"))


def test_a_model_without_any_loss_is_refused_in_keras_words():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd")
    with pytest.raises(UsageError, match="No loss to compute"):
        check_batch(model, X[:4].astype("float32"))


class Packed:
    manifest = Manifest({"state": "0" * 64})
    files, state_parts = {}, [b""]
    code = False


def submission(captured, **options):
    resolved = resolve(options)
    return specify(captured, Packed(), resolved, cluster=resolved.cluster, initial_epoch=0)


def keras_order_of(seed, shuffle, samples=37, batch_size=5):
    keras.utils.set_random_seed(seed)
    rows = np.arange(samples)[:, None]
    batches = keras_batches(x=rows, batch_size=batch_size, shuffle=shuffle)
    return np.concatenate([batch.numpy()[:, 0] for batch in batches]).tolist()


@pytest.mark.parametrize("shuffle", [True, "batch", False])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_the_order_of_arrays_is_that_of_keras_with_the_same_seed(read, shuffle, seed):
    keras.utils.set_random_seed(seed)
    spec = submission(read(np.zeros((37, 3)), np.zeros((37, 1)), batch_size=5, shuffle=shuffle)).spec
    for pass_index in (0, 1):  # TensorFlow begins anew with every pass
        assert spec.sample_order(pass_index).tolist() == keras_order_of(seed, shuffle)


def test_drawing_the_order_of_arrays_leaves_the_script_s_generators_alone(read):
    keras.utils.set_random_seed(3)
    expected = np.random.random(), random.random(), float(tf.random.uniform([]))
    keras.utils.set_random_seed(3)
    submission(read(X, Y))
    assert (np.random.random(), random.random(), float(tf.random.uniform([]))) == expected


@pytest.fixture
def unseeded():
    """Forget the seed of TensorFlow, as in a script that sets none."""
    tf.random.set_seed(None)


@pytest.mark.usefixtures("unseeded")
def test_without_a_seed_each_fit_and_each_pass_has_an_order_of_its_own(read):
    data = np.zeros((37, 3)), np.zeros((37, 1))
    specs = [submission(read(*data)).spec for _ in range(2)]
    orders = {tuple(spec.sample_order(number)) for spec in specs for number in (0, 1)}
    assert len(orders) == 4
    assert submission(read(*data, shuffle="batch")).spec.fit.shuffle is False


def test_the_seed_of_other_data_is_drawn_from_python_s_generator(read):
    seeds = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        seeds.append(submission(read((X, Y) for _ in range(3))).spec.fit.seed)
    assert seeds[0] == seeds[1] != seeds[2]


def test_the_job_names_all_its_artifacts(read):
    made = submission(read(X, Y, validation_data=(X, Y), epochs=3, validation_freq=[1, 3]))
    assert set(made.spec.artifacts) == set(made.blobs)
    assert {made.spec.program, *made.spec.train.arrays, *made.spec.validation.arrays} <= set(made.blobs)
    assert made.spec.fit.validation_freq == (1, 3)
    assert made.spec.train.arrays == made.spec.validation.arrays, "equal arrays are sent once"


def test_wrong_arguments_are_python_s_type_error(fit_arguments):
    with pytest.raises(TypeError, match="epoch"):
        fit_arguments(X, Y, epoch=3)
