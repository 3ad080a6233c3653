"""Records of a shard: its state apart from weights and optimizer variables, as named arrays.

=========================================  =====================================================================
name                                       content
=========================================  =====================================================================
``version``                                number of updates applied
``rule/<name>``                            state of the update rule
``optimizer/<i>``                          the i-th variable of the optimizer if every shard has its own: iterations
``mode/closed_round``                      newest closed round, in a job with rounds
``mode/rule/<name>``                       state of the rule for all workers, in a job with rounds
``mode/<field>``                           fields of the partly filled accumulator, if an update has several pushes
``tasks``                                  numbers of the applied tasks, as ranges (begin, end), in a job without rounds
``workers/<worker>/rule/<name>``           state of the rule for this worker
``tables/<t>/rule/<name>``                 state of the rule for the t-th table
``tables/<t>/workers/<worker>/<name>``     state of the rule for this worker and table; the worker ``""`` is a round
=========================================  =====================================================================

The names of workers are quoted as in URLs. The records of all shards together have the names ``<index>/<name>``. In a
shard they are a tree of mappings, one level for each part of a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.errors import ProtocolError

RecordTree = Mapping[str, Any]
"""Records as a tree: its leaves are arrays, tensors or numbers."""


def to_arrays(tree: RecordTree) -> dict[str, Any]:
    """Return the leaves of a tree by name, as arrays or pieces of arrays; an empty mapping leaves no trace."""
    found: dict[str, Any] = {}
    for part, node in tree.items():
        name = quote(part, safe="")
        if isinstance(node, Mapping):
            found.update({f"{name}/{below}": array for below, array in to_arrays(node).items()})
        else:
            found[name] = node if isinstance(node, Pieces) else np.asarray(node)
    return found


def to_tree(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Inverse of :func:`to_arrays`."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *above, last = map(unquote, name.split("/"))
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


def join_records(shards: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the records of all shards together, given those of each shard in order."""
    return {f"{index}/{name}": array for index, records in enumerate(shards) for name, array in records.items()}


def part_of_records(records: Mapping[str, Array], index: int) -> dict[str, Array]:
    """Return the records of one shard from those of all shards.

    Raises:
        ProtocolError: there are none of this shard.
    """
    prefix = f"{index}/"
    part = {name.removeprefix(prefix): array for name, array in records.items() if name.startswith(prefix)}
    if "version" not in part:
        shards = sorted({name.partition("/")[0] for name in records})
        raise ProtocolError(
            f"Records: expected those of shard {index}. Received: those of {', '.join(shards) or 'no shard'}. "
            "Use the records of a snapshot of the same job."
        )
    return part


def closed_round_of(records: Mapping[str, Array]) -> int:
    """Return the newest closed round from the records of one shard; 0 without rounds."""
    return int(records.get("mode/closed_round", 0))
