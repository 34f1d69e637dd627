# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet.

    SeerError
    ├── ConfigError        a setting is missing, unknown or impossible      (exit code 2)
    ├── InputError         a file or prompt given by the user is bad        (exit code 2)
    ├── MissingExtra       an optional dependency is not installed          (exit code 2)
    ├── InstanceError      an instance refused, died or hung
    │   ├── Overloaded     it has no room for the chunk; nothing was started
    │   └── NoProbability  the model gives NaN or infinite logits; ends the run
    ├── PoolError          the KV pool could not do what was asked
    ├── DraftError         the draft server or index could not do what was asked
    └── DeadlineExceeded   a named wait ran out of time

A message says what, got and limit; `hint` says what to do about it. Programming errors are assertions, not these.
"""


class SeerError(Exception):
    """Base of all errors Seer raises on purpose; `hint` is one line of advice."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(SeerError):
    """A setting is missing, unknown or impossible."""


class InputError(SeerError):
    """A file or prompt given by the user is bad."""


class MissingExtra(SeerError):  # noqa: N818 - reads as what it is
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", hint=f"pip install 'seer-rollout[{extra}]'")


class InstanceError(SeerError):
    """An instance refused a call, died or hung."""


class Overloaded(InstanceError):  # noqa: N818 - reads as what it is
    """The instance has no room for the chunk; nothing was started."""


class NoProbability(InstanceError):  # noqa: N818 - reads as what it is
    """The model's logits give no probability. It gives them everywhere, so the run ends."""


class PoolError(SeerError):
    """The KV pool could not do what was asked."""


class DraftError(SeerError):
    """The draft server or index could not do what was asked."""


class DeadlineExceeded(SeerError):  # noqa: N818 - reads as what it is
    """A named wait ran out of time."""

    def __init__(self, what: str, limit_s: float, *, cause: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{what} took longer than {limit_s:g} s" + (f": {cause}" if cause else ""), hint=hint)
