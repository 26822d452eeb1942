"""The errors that a user can cause. Each one is a single clear line and carries its exit status."""

from __future__ import annotations

from pathlib import Path


class AdaptError(Exception):
    """Base of the errors that the command line prints as one line, without a traceback."""

    exit_status = 1


class InputError(AdaptError):
    """Bad input: names the file, the field, what is wrong and how to mend it. Exit status 2."""

    exit_status = 2

    def __init__(
        self,
        where: str | Path,
        *,
        fault: str,
        field: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.where, self.field, self.fault, self.fix = str(where), field, fault, fix
        message = f"{where}: {field}: {fault}" if field else f"{where}: {fault}"
        super().__init__(f"{message} ({fix})" if fix else message)


class InfeasibleError(AdaptError):
    """No plan fits: names the limit that binds and by how much. Exit status 3."""

    exit_status = 3


class ProofError(AdaptError):
    """A verification or validation failed: names the check. Exit status 4."""

    exit_status = 4
