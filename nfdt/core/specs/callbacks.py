"""Specification of the Keras callbacks of a detached job."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CallbackKind = Literal["EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau", "TerminateOnNaN"]
"""Class of ``keras.callbacks``: those that need nothing of the script's process, and write no file."""

_SHA256 = r"^[0-9a-f]{64}$"


class CallbackSpec(BaseModel):
    """One callback: its class, and its function if it has one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: CallbackKind
    code: str | None = Field(None, pattern=_SHA256, description="artifact of the pickled schedule")
    sources: dict[str, str] = Field(
        default_factory=dict, description="digests of the source texts of the schedule: pickles differ"
    )


class CallbacksSpec(BaseModel):
    """Callbacks of a job, and their state after the last epoch that has ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    members: tuple[CallbackSpec, ...] = Field(max_length=100)
    state: str = Field(max_length=2**18, description="JSON that workers read; see nfdt.model.training.epoch_callbacks")
    learning_rate: float | None = Field(None, description="of the next epoch; None: callbacks do not set it")
    kept: dict[int, str] = Field(default_factory=dict, description="epoch -> state that they may restore")

    @property
    def code(self) -> set[str]:
        """Artifacts with pickled code."""
        return {member.code for member in self.members if member.code is not None}

    @property
    def artifacts(self) -> set[str]:
        """All artifacts."""
        return {*self.code, *self.kept.values()}
