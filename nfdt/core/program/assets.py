"""Files that layers have besides their variables: the vocabularies of text and category layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nfdt.core.errors import ProtocolError
from nfdt.core.keras_internals import flatten_layers


def _layers_with(model: Any, method: str) -> dict[int, Any]:
    layers = enumerate(flatten_layers(model))
    return {index: layer for index, layer in layers if hasattr(layer, method)}


def save_assets(model: Any, store: Callable[[bytes], str]) -> dict[str, dict[str, str]]:
    """Store each layer's files and return layer index -> file name -> artifact."""
    found: dict[str, dict[str, str]] = {}
    for index, layer in _layers_with(model, "save_assets").items():
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            files = {path.name: store(path.read_bytes()) for path in sorted(Path(folder).iterdir())}
        if files:
            found[str(index)] = files
    return found


def load_assets(model: Any, assets: Mapping[str, Mapping[str, str]], read: Callable[[str], bytes]) -> None:
    """Load each layer's files into it.

    Raises:
        ProtocolError: the layer accepts no files, or a file name leaves the folder.
    """
    layers = _layers_with(model, "load_assets")
    for index, files in assets.items():
        if int(index) not in layers:
            raise ProtocolError(f"Program: expected assets for the layers {sorted(layers)}. Received: layer {index}.")
        with tempfile.TemporaryDirectory() as folder:
            for name, artifact in files.items():
                if name != Path(name).name or name in ("", ".", ".."):
                    raise ProtocolError(f"Program: expected a plain file name. Received: {name!r}.")
                Path(folder, name).write_bytes(read(artifact))
            layers[int(index)].load_assets(folder)
