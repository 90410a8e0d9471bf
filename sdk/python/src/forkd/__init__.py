"""forkd: `fork(2)` for virtual machines.

    from forkd import Sandbox

    with Sandbox.create("numpy") as box:
        box.eval("plan = ['read', 'think']")
        for child in box.fork(3):
            with child:
                print(child.eval("plan + ['act']"))

`Sandbox` and `Snapshot` are for most programs, `Client` has every operation of the daemon.
"""

from ._beside import check as _check

_check()

from .async_client import AsyncClient
from .async_commands import AsyncCommandHandle
from .async_sandbox import AsyncSandbox
from .async_snapshot import AsyncSnapshot
from .changes import Change
from .client import Client
from .code import Execution
from .commands import CommandHandle
from .entries import Transfer
from .errors import (
    AllFailedError,
    AuthenticationError,
    BusyError,
    CommandError,
    CommandTimeoutError,
    ConflictError,
    DaemonError,
    DaemonUnreachableError,
    DiskFullError,
    EvalError,
    EvalTimeoutError,
    ForkdError,
    ForkError,
    GuestError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QuotaError,
    RateLimitError,
    RollbackError,
    SandboxEndedError,
    SandboxPausedError,
    SnapshotNotReadyError,
    StreamBrokenError,
    TimeoutError,
)
from .exec_stream import CommandResult, Output
from .forked import Forked
from .models import SandboxInfo, SnapshotInfo
from .reference import Controller, ControllerError
from .sandbox import Sandbox
from .snapshot import Snapshot
from .trying import Outcome

__all__ = [
    "AllFailedError",
    "AsyncClient",
    "AsyncCommandHandle",
    "AsyncSandbox",
    "AsyncSnapshot",
    "AuthenticationError",
    "BusyError",
    "Change",
    "Client",
    "CommandError",
    "CommandHandle",
    "CommandResult",
    "CommandTimeoutError",
    "ConflictError",
    "Controller",
    "ControllerError",
    "DaemonError",
    "DaemonUnreachableError",
    "DiskFullError",
    "EvalError",
    "EvalTimeoutError",
    "Execution",
    "ForkError",
    "ForkdError",
    "Forked",
    "GuestError",
    "InvalidRequestError",
    "NotFoundError",
    "Outcome",
    "Output",
    "PermissionDeniedError",
    "QuotaError",
    "RateLimitError",
    "RollbackError",
    "Sandbox",
    "SandboxEndedError",
    "SandboxInfo",
    "SandboxPausedError",
    "Snapshot",
    "SnapshotInfo",
    "SnapshotNotReadyError",
    "StreamBrokenError",
    "TimeoutError",
    "Transfer",
]
__version__ = "0.2.0"
