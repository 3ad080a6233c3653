"""Tables of ``nfdt.Embedding`` as files: safetensors of limited size, with the index that Hugging Face uses.

A table is cut by rows: ``<layer>/<array>/<first row>`` names each tensor. ``<array>`` is ``embeddings``, or
``optimizer/<k>`` for the k-th optimizer variable of the table. No table is in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import ArrayEntry, ArrayRanges, Pieces, load_arrays, stream_parts
from nfdt.core.errors import UsageError
from nfdt.core.host.private_files import replacing
from nfdt.model.backends.embedding import Embedding, StoredRows, stored_rows
from nfdt.model.backends.variables import views_of
from nfdt.model.keras_internals.models import flatten_layers, has_no_rows
from nfdt.model.program.state import dump_state_parts
from nfdt_client.connection import JobsClient
from nfdt_client.job_session import JobSession
from nfdt_client.patch import current_handler
from nfdt_client.tables import optimizer_of
from nfdt_client.tracebacks import hide_frames
from nfdt_client.upload import Blob, read_ranges, upload

INDEX = "model.safetensors.index.json"
PIECE_BYTES = 8 * 2**20
_FLOAT = np.dtype("<f4")
_TABLES = "tables"

ReadRows = Callable[[int, int], Array]
"""Rows from a first one up to a last one, exclusive: shape ``(k, width)``, float32."""


@dataclass(frozen=True)
class _RowsFile:
    """Tensor of a file: some rows of an array."""

    name: str
    read: ReadRows
    first: int
    stop: int
    width: int

    def pieces(self) -> Pieces:
        """Return the rows, read piece by piece."""
        step = max(1, PIECE_BYTES // (4 * self.width))
        entry = ArrayEntry(_FLOAT, (self.stop - self.first, self.width))
        ranges = ((at, min(at + step, self.stop)) for at in range(self.first, self.stop, step))
        return Pieces(entry, (self.read(*each) for each in ranges))


@hide_frames
def save_tables(model: Any, folder: str | Path, *, file_mb: float = 1024.0) -> None:
    """Write the tables of all ``nfdt.Embedding`` of a model, and their optimizer variables, to files in a folder.

    Call it within the session that has trained them. ``model.save`` writes the rest of the model.

    Args:
        model: A built model.
        folder: The folder, which is made; it must have no tables yet.
        file_mb: Size limit of a file, in MB.

    Raises:
        UsageError: the folder has tables already, the model has none, or this session's server does not have them.
    """
    folder, layers = Path(folder), _layers(model)
    if (folder / INDEX).exists():
        raise UsageError(f"save_tables: expected a folder without tables. Received: {folder}, which has {INDEX}.")
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: _arrays(layer) for name, layer in layers.items()}
    files = _files(layers, arrays, int(file_mb * 2**20))
    where, total = {}, 0
    for number, parts in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with replacing(folder / file_name) as file:
            size, contents = stream_parts({part.name: part.pieces() for part in parts})
            for each in contents:
                file.write(each)
        where.update({part.name: file_name for part in parts})
        total += size
    described = {name: [layer.input_dim, layer.output_dim, len(arrays[name])] for name, layer in layers.items()}
    with replacing(folder / INDEX) as file:
        index = {"metadata": {"total_size": total, _TABLES: described}, "weight_map": where}
        file.write(json.dumps(index, indent=2).encode())


@hide_frames
def load_tables(model: Any, folder: str | Path) -> None:
    """Give the ``nfdt.Embedding`` of a model the tables that :func:`save_tables` has written.

    Tables on the shards are uploaded to the server of the session in which this is called. Optimizer variables are
    taken over if the optimizer of the model has as many for a table.

    Args:
        model: A built model, compiled if it is to be trained.
        folder: The folder.

    Raises:
        UsageError: the folder lacks a table of the model, or no session is open.
    """
    folder, layers = Path(folder), _layers(model)
    if not (folder / INDEX).is_file():
        raise UsageError(f"load_tables: expected a folder that save_tables has written. Received: {folder}.")
    index = json.loads((folder / INDEX).read_bytes())
    described = index["metadata"].get(_TABLES, {})
    for name, layer in layers.items():
        found, wanted = described.get(name), [layer.input_dim, layer.output_dim]
        if found is None or found[:2] != wanted:
            raise UsageError(
                f"load_tables: expected a table of shape {tuple(wanted)} for layer {name!r}. Received: "
                f"{'none' if found is None else tuple(found[:2])}. {folder} has {sorted(described)}."
            )
    stored = _StoredParts(folder, index["weight_map"])
    rowless = {name: layer for name, layer in layers.items() if has_no_rows(layer.embeddings)}
    for name in layers.keys() - rowless.keys():
        layers[name].embeddings.assign(stored.pieces(name, "embeddings", layers[name]).joined())
    if rowless:
        _upload(model, rowless, {name: described[name][2] - 1 for name in rowless}, stored)


def _layers(model: Any) -> dict[str, Any]:
    """Return the layers with a table by name."""
    layers = [layer for layer in flatten_layers(model) if isinstance(layer, Embedding) and layer.built]
    named = {layer.name: layer for layer in layers}
    if not layers or len(named) < len(layers):
        raise UsageError(
            "Tables: expected a built model with layers nfdt.Embedding of different names. Received: "
            f"{sorted(layer.name for layer in layers) or 'none'}."
        )
    return named


def _arrays(layer: Any) -> dict[str, ReadRows]:
    """Return the arrays of a table by name: the table, and its optimizer variables where they are known."""
    stored, variable = stored_rows.get(layer), layer.embeddings
    if not has_no_rows(variable):
        (view,) = views_of([variable])
        return {"embeddings": lambda first, stop: view[first:stop].astype(np.float32)}
    if stored is None:

        def made(first: int, stop: int) -> Array:
            rows = np.empty((stop - first, layer.output_dim), np.float32)
            layer.seeded_rows.fill(rows, first)
            return rows

        return {"embeddings": made}
    state = ArrayRanges(partial(read_ranges, _connection(stored.server), stored.state))
    width = layer.output_dim
    found = {"embeddings": partial(_stored, state, "weights", stored.start, width)}
    slots = {f"optimizer/{k}": partial(_stored, state, f"optimizer/{i}", 0, width) for k, i in enumerate(stored.slots)}
    return {**found, **slots}


def _stored(state: ArrayRanges, name: str, start: int, width: int, first: int, stop: int) -> Array:
    return state.elements(name, start + first * width, start + stop * width).reshape(-1, width)


def _files(layers: Mapping[str, Any], arrays: Mapping[str, Mapping[str, ReadRows]], most: int) -> list[list[_RowsFile]]:
    """Return the tensors of each file, of at most ``most`` bytes or one row."""
    files, room = [list[_RowsFile]()], most
    for layer_name, layer in layers.items():
        row = 4 * layer.output_dim
        for array_name, read in arrays[layer_name].items():
            first = 0
            while first < layer.input_dim:
                if room < row and files[-1]:
                    files.append([])
                    room = most
                stop = min(layer.input_dim, first + max(1, room // row))
                name = f"{layer_name}/{array_name}/{first}"
                files[-1].append(_RowsFile(name, read, first, stop, layer.output_dim))
                first, room = stop, room - row * (stop - first)
    return files


class _StoredParts:
    """Tensors of the files in a folder, mapped file by file."""

    def __init__(self, folder: Path, where: Mapping[str, str]) -> None:
        self._folder, self._where = folder, where

    def pieces(self, layer_name: str, array_name: str, layer: Any) -> Pieces:
        """Return an array of a table.

        Raises:
            UsageError: the files lack rows.
        """
        prefix = f"{layer_name}/{array_name}/"
        firsts = sorted(int(name.removeprefix(prefix)) for name in self._where if name.startswith(prefix))
        parts = [load_arrays(self._folder / self._where[f"{prefix}{at}"])[f"{prefix}{at}"] for at in firsts]
        if sum(map(len, parts)) != layer.input_dim:
            raise UsageError(f"load_tables: expected {layer.input_dim} rows of {prefix[:-1]!r} in {self._folder}.")
        return Pieces(ArrayEntry(_FLOAT, (layer.input_dim, layer.output_dim)), parts)


def _connection(server: str | None = None) -> JobsClient:
    """Return the connection of the session in which this is called.

    Raises:
        UsageError: none is open, or it is not that of ``server``.
    """
    handler = current_handler()
    connection = handler.connection() if isinstance(handler, JobSession) else None
    if connection is None or server not in (None, connection.address):
        where = "none" if connection is None else connection.address
        raise UsageError(
            f"Tables on the shards: expected an open session{f' with the server {server}' if server else ''}. "
            f"Received: {where}. Call this within nfdt.session or nfdt.distribute, outside of fit; a server that a "
            "session starts ends with it, and its tables as well."
        )
    return connection


def _upload(model: Any, layers: Mapping[str, Any], slots: Mapping[str, int], stored: _StoredParts) -> None:
    """Upload tables as a state, of which the next jobs of the model take them."""
    connection = _connection()
    weights, optimizer, places = list[Array](), dict[int, Pieces](), dict[str, tuple[int, tuple[int, ...]]]()
    start = 0
    for name, layer in layers.items():
        weights += stored.pieces(name, "embeddings", layer).arrays
        own = tuple(range(len(optimizer), len(optimizer) + slots[name]))
        optimizer.update({i: stored.pieces(name, f"optimizer/{k}", layer) for k, i in enumerate(own)})
        places[name] = start, own
        start += layer.input_dim * layer.output_dim
    blob = Blob(*dump_state_parts(Pieces(ArrayEntry(_FLOAT, (start,)), weights), optimizer, {}))
    upload(connection, {blob.sha256: blob})
    for name, layer in layers.items():
        begin, own = places[name]
        stored_rows[layer] = StoredRows(connection.address, blob.sha256, begin, own, optimizer_of(model))
