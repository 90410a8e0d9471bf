"""Errors: a class for each group of the API's codes.

Every error has a `message` for people: what happened and what to do. `code` is for programs and does not change with
the wording. `status` and `request_id` belong to the reply of the daemon, if there was one.
"""

from __future__ import annotations

import builtins
from typing import Any, Dict, List, Optional, Tuple, Type


class ForkdError(RuntimeError):
    """Any failure of this package or of the daemon."""

    def __init__(
        self,
        message: str,
        *,
        code: Optional[str] = None,
        status: Optional[int] = None,
        request_id: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.request_id = request_id
        # Whether the request may have been done all the same: it was sent, and its reply never came.
        self.outcome_unknown = False

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Tuple[Any, ...]:
        """As `pickle` and `copy` make it again, without the arguments of the constructor, which differ."""
        return _again, (type(self), self.args), self.__dict__


def _again(cls: Type[ForkdError], args: Tuple[Any, ...]) -> ForkdError:
    """An error of this class; its fields follow."""
    # The built-in errors of the operating system are objects of another size.
    error = OSError.__new__(cls, *args) if issubclass(cls, OSError) else cls.__new__(cls, *args)
    error.args = args
    return error


class InvalidRequestError(ForkdError, ValueError):
    """A field, a parameter or the body of the request is wrong. The same request fails again."""


class AuthenticationError(ForkdError):
    """The token is missing, wrong or expired."""


class PermissionDeniedError(ForkdError, PermissionError):
    """The token, or the user in the guest, may not do that."""


class NotFoundError(ForkdError, LookupError):
    """The caller has no such object: a sandbox, a snapshot, an image, or a file in the guest."""


class SandboxEndedError(NotFoundError):
    """The sandbox has ended, or never was. It does not come back: create or fork another one."""


class ConflictError(ForkdError):
    """The object is in a state that does not allow the request: a taken tag, a busy sandbox."""


class SandboxPausedError(ConflictError):
    """The sandbox is paused: call `resume()` first."""


class SnapshotNotReadyError(ConflictError):
    """The snapshot is still being made: call `Snapshot.wait_ready()` first."""


class QuotaError(ForkdError):
    """The quota of the owner, or a limit of the daemon, is used up: end or remove something first."""


class RateLimitError(ForkdError):
    """The client sends too many requests. `retry_after` has the seconds to wait."""

    retry_after: Optional[float] = None


class BusyError(ForkdError):
    """The daemon or the guest has too much to do, or is stopping: try again in a moment."""

    retry_after: Optional[float] = None


class TimeoutError(ForkdError, builtins.TimeoutError):
    """The daemon, the guest or a command took longer than allowed."""


class GuestError(ForkdError):
    """The guest did not start, or its agent is broken."""


class DiskFullError(ForkdError):
    """The disk of the daemon or of the guest is full."""


class DaemonError(ForkdError):
    """The daemon or its host failed. The daemon's log has the cause under the `request_id`."""


class DaemonUnreachableError(ForkdError, ConnectionError):
    """No daemon answers at the address."""


class StreamBrokenError(ForkdError, ConnectionError):
    """The connection broke before the reply was complete."""


class CommandError(ForkdError):
    """A command ended with a status other than 0. `commands.run(…, check=False)` returns the result instead."""

    def __init__(self, message: str, *, exit_code: int, stdout: str, stderr: str, code: Optional[str] = None) -> None:
        super().__init__(message, code=code)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr


class CommandTimeoutError(CommandError, TimeoutError):
    """A command was killed at its timeout. `stdout` and `stderr` have its output until then."""


class EvalError(ForkdError):
    """The evaluated code raised an exception: its class is `name`, its text `value`."""

    def __init__(self, message: str, *, name: str, value: str, traceback: str) -> None:
        super().__init__(message)
        self.name = name
        self.value = value
        self.traceback = traceback


class EvalTimeoutError(EvalError, TimeoutError):
    """The evaluated code was interrupted at its timeout."""


class ForkError(ForkdError):
    """Not all children started; those that did were ended. `errors` has one message for each that did not."""

    errors: List[str]


class RollbackError(ForkdError):
    """A `checkpoint` could not roll back after its block had raised.

    The branch `tag` is kept. `__cause__` is the exception of the block; code and status are those of the refused rollback.
    """

    tag: str = ""


class AllFailedError(ForkdError):
    """Every attempt of `first_success` or `best_of` failed. `outcomes` has each of them, in order."""

    outcomes: List[Any]


_CODES: Dict[Type[ForkdError], str] = {
    InvalidRequestError: "invalid_request folder_too_large path_not_allowed method_not_allowed body_too_large uri_too_long"
    " unsupported_media_type headers_too_large websocket_required idempotency_key_reused",
    AuthenticationError: "unauthorized token_expired",
    PermissionDeniedError: "forbidden origin_forbidden guest_forbidden",
    NotFoundError: "route_not_found snapshot_not_found workspace_not_found image_not_found token_not_found"
    " path_not_found guest_not_found",
    SandboxEndedError: "sandbox_not_found sandbox_ended sandbox_lost",
    ConflictError: "workspace_running workspace_not_running tag_taken state_unknown name_taken name_reserved"
    " sandbox_starting sandbox_suspending sandbox_busy sandbox_replaced sandbox_unfit no_rollback_target"
    " snapshot_failed snapshot_unusable snapshot_disk_only snapshot_in_use snapshot_replaced cancelled"
    " workspace_busy workspace_unusable monitor_refused guest_conflict idempotency_in_progress"
    " idempotency_outcome_unknown idempotency_answer_lost address_in_use",
    SandboxPausedError: "sandbox_paused sandbox_waits_for_disk",
    SnapshotNotReadyError: "snapshot_not_ready",
    QuotaError: "quota_exceeded limit_reached too_many_tokens",
    RateLimitError: "rate_limited",
    BusyError: "daemon_busy shutting_down guest_busy",
    TimeoutError: "request_timeout guest_timeout sandbox_unresponsive",
    GuestError: "guest_failed",
    DiskFullError: "disk_full guest_disk_full",
    DaemonError: "internal template_ended not_implemented",
}
BY_CODE: Dict[str, Type[ForkdError]] = {code: group for group, codes in _CODES.items() for code in codes.split()}


def error_for(
    code: Optional[str], message: str, *, status: Optional[int] = None, request_id: Optional[str] = None
) -> ForkdError:
    """The error for a code of the API. An unknown code is a plain `ForkdError`."""
    group = BY_CODE.get(code or "", ForkdError)
    return group(message, code=code, status=status, request_id=request_id)
