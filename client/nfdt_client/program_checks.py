"""Checks of a packed program that need the options of its job."""

from __future__ import annotations

import logging
from typing import Any

from nfdt.core.errors import UsageError
from nfdt.core.program.manifest import Manifest
from nfdt.core.sharding import why_uncuttable
from nfdt.core.specs.job import ClusterSpec
from nfdt_client.captured import Capture

logger = logging.getLogger(__name__)


def look_at_metrics(captured: Capture, batch: Any, *, interactive: bool) -> None:
    """Move the validation into this process if ``test_step`` returns logs that workers cannot compute.

    Raises:
        CaptureError: a metric cannot be merged.
        UsageError: a detached job has no process that validates.
    """
    from nfdt.core.program.metrics import check_metrics

    validation = captured.validation
    sample = None if validation is None else validation.first()
    own = check_metrics(captured.model, batch, sample)
    if not own:
        return
    what = f"test_step returns logs that are no results of metrics: {', '.join(own)}."
    if not interactive:
        raise UsageError(
            f"submit: {what} Workers validate with metrics alone. Expected: for instance keras.metrics.Mean, updated "
            "and returned by test_step; or nfdt.distribute, which validates such a model in this script."
        )
    logger.warning("%s The model is therefore validated in this process, not on the workers.", what)
    captured.validation = None


def check_shards(model: Any, manifest: Manifest, cluster: ClusterSpec) -> None:
    """Raise UsageError if the optimizer needs all variables in one place but there are several shards."""
    if cluster.shards == 1:
        return
    obstacle, name = why_uncuttable(manifest), type(model.optimizer).__name__
    if obstacle is None:
        return
    reason = {
        "global norm": f"global_clipnorm of {name} is a norm over all variables",
        "unattributed": f"the variables of {name} cannot be attributed to the model's variables",
    }[obstacle]
    raise UsageError(f"shards={cluster.shards}: expected 1, because {reason}. Remove the option shards.")
