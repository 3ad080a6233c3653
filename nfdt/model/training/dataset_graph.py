"""The graph of a ``tf.data.Dataset`` as an artifact: a header in JSON, and the graph without its sources.

::

    magic number | length of the header, 8 bytes | header, JSON | GraphDef

Each worker runs the graph on the rows that it takes. A row is an element of the graph's source: a row of the arrays of
``from_tensor_slices``, or a number of a range.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nfdt.core.errors import ProtocolError

_MAGIC = b"NFDTDS1\n"
_LENGTH_BYTES = 8


class _HeaderPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceHeader(_HeaderPart):
    """A source of the graph, which the worker replaces by the rows that it takes.

    Attributes:
        node: Name of the node.
        arrays: Index of the job's array for each component; -1 for a component in ``texts``.
        texts: Nodes of the graph that hold components of strings, by component.
        range: start, step and dtype of a range; it has no components then.
    """

    node: str
    arrays: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    range: tuple[int, int, str] | None = None


class FileSize(_HeaderPart):
    """A file that the graph reads, and its size on the client's machine."""

    path: str
    size: int = Field(ge=0)


class DatasetHeader(_HeaderPart):
    """Description of a graph, with which a process runs it on a part of its rows.

    Attributes:
        output: Node of the dataset.
        element: Structure of an element, see :func:`write_element`.
        sources: Sources; all have the same rows.
        first: First row that the dataset uses.
        rows: Number of rows that it uses.
        shuffle: Number of consecutive rows that a pass keeps together in random order; 0: rows stay in their order.
        reshuffle: Whether every pass has an order of its own.
        seed: Seed of the order; 0: the job's.
        files: Files that the graph reads.
    """

    output: str
    element: Any
    sources: tuple[SourceHeader, ...] = Field(min_length=1)
    first: int = Field(ge=0)
    rows: int = Field(ge=1)
    shuffle: int = Field(0, ge=0)
    reshuffle: bool = True
    seed: int = 0
    files: tuple[FileSize, ...] = ()


class DatasetGraph(_HeaderPart):
    """A header and a serialized ``GraphDef``."""

    header: DatasetHeader
    graph: bytes = Field(repr=False)

    def to_bytes(self) -> bytes:
        """Return the artifact."""
        header = self.header.model_dump_json().encode()
        return b"".join((_MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, self.graph))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DatasetGraph:
        """Inverse of :meth:`to_bytes`.

        Raises:
            ProtocolError: The data is no such artifact.
        """
        data = bytes(data)
        start = len(_MAGIC) + _LENGTH_BYTES
        stop = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        if not data.startswith(_MAGIC) or stop > len(data):
            raise ProtocolError("Dataset: expected a header and a graph. Received something else.")
        try:
            header = DatasetHeader.model_validate_json(data[start:stop])
        except ValidationError as error:
            raise ProtocolError(f"Dataset: expected a header. Received: {error.errors()[0]['msg']}.") from None
        return cls(header=header, graph=data[stop:])


def write_element(spec: Any) -> Any:
    """Return the structure of a dataset's elements as JSON.

    Raises:
        TypeError: A part is neither a dense tensor nor a nest of them.
    """
    import tensorflow as tf

    if isinstance(spec, tuple | list) and not hasattr(spec, "_fields"):
        return {"tuple": [write_element(part) for part in spec]}
    if type(spec) is dict:
        return {"dict": {str(name): write_element(part) for name, part in spec.items()}}
    if isinstance(spec, tf.TensorSpec):
        return {"dtype": spec.dtype.name, "shape": None if spec.shape.rank is None else spec.shape.as_list()}
    raise TypeError(type(spec).__name__)


def read_element(element: Any) -> Any:
    """Inverse of :func:`write_element`."""
    import tensorflow as tf

    if "tuple" in element:
        return tuple(read_element(part) for part in element["tuple"])
    if "dict" in element:
        return {name: read_element(part) for name, part in element["dict"].items()}
    return tf.TensorSpec(element["shape"], tf.as_dtype(element["dtype"]))
