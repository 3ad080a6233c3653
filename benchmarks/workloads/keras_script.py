"""An ordinary Keras script that trains one of the models on this machine; hfdt runs it unmodified."""

from __future__ import annotations

import json

import keras

from benchmarks.workloads.epochs import watch_epochs
from benchmarks.workloads.images import load_images
from benchmarks.workloads.models import build
from benchmarks.workloads.work import work_options

options = work_options(__doc__)

images, labels = load_images(options.data)
watch, begins = watch_epochs(keras)
model = build(options.case, keras)
model.fit(images, labels, batch_size=options.batch, epochs=options.epochs, verbose=0, callbacks=[watch])
options.result.write_text(json.dumps(begins))
