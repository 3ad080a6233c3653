"""An ordinary Keras script that trains one of the models on this machine: what hfdt runs unmodified."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import keras

from benchmarks.epochs import watch_epochs
from benchmarks.images import load_images
from benchmarks.models import CASES, build

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("case", choices=CASES)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--result", type=Path, required=True)
options = parser.parse_args()

images, labels = load_images(options.data)
watch, begins = watch_epochs(keras)
model = build(options.case, keras)
model.fit(images, labels, batch_size=options.batch, epochs=options.epochs, verbose=0, callbacks=[watch])
options.result.write_text(json.dumps(begins))
