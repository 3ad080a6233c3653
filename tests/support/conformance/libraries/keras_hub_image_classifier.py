"""An image classifier of KerasHub on a small ResNet."""

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
labels = draw.integers(0, 3, 48)
images = (draw.normal(size=(48, 16, 16, 3)) * 20 + 60 * labels[:, None, None, None]).astype("float32")

backbone = keras_hub.models.ResNetBackbone(
    input_conv_filters=[64],
    input_conv_kernel_sizes=[3],
    stackwise_num_filters=[64, 64],
    stackwise_num_blocks=[1, 1],
    stackwise_num_strides=[1, 2],
    block_type="basic_block",
)
model = keras_hub.models.ImageClassifier(backbone=backbone, num_classes=3)
model.compile(
    optimizer=keras.optimizers.SGD(1e-2, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(images / 255.0, labels, batch_size=16, epochs=3, verbose=0)
