"""Selection of rows: consecutive ones, or any."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

RowSelection = slice | npt.NDArray[np.int64]
