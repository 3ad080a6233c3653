"""What one worker counts of itself."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from nfdt.transport.base import ParameterClient


@dataclass
class Statistics:
    """Totals of one worker since it joined; what ``history.nfdt`` shows.

    ``exchange_s`` is the time it waited for shards; what an exchange took while a gradient was computed is not in it.
    """

    samples: int = 0
    steps: int = 0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    dropped: int = 0

    def to_json(self, client: ParameterClient, codec: str) -> str:
        """The totals as one JSON object."""
        return json.dumps(
            {
                "samples": self.samples,
                "steps": self.steps,
                "seconds": round(self.compute_s + self.exchange_s, 6),
                "compute_s": round(self.compute_s, 6),
                "exchange_s": round(self.exchange_s, 6),
                "wait_s": round(self.wait_s, 6),
                "staleness": {str(k): v for k, v in sorted(self.staleness.items())},
                "batch_sizes": {str(k): v for k, v in sorted(self.batch_sizes.items())},
                "dropped": self.dropped,
                "bytes_sent": client.bytes_sent,
                "bytes_received": client.bytes_received,
                "codec": codec,
                **({"codecs": dict(codecs)} if (codecs := client.codecs) else {}),
            }
        )
