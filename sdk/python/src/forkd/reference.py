"""`Controller`, as clients of the reference know it: its methods take and return plain values."""

from __future__ import annotations

from typing import Any, Literal, Optional, cast

from .calls import Call, anything, nothing
from .client import Client
from .errors import ForkdError

BranchMode = Literal["full", "diff", "live"]


class ControllerError(ForkdError):
    """The daemon refused a request; `body` has `error`, `code` and `request_id`. Status 0 means that no answer came."""

    def __init__(self, status: int, body: Any, url: str) -> None:
        fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        code, request = fields.get("code"), fields.get("request_id")
        super().__init__(f"{url}: {status}: {fields.get('error', body)}", code=code, status=status, request_id=request)
        self.status: int = status
        self.body: Any = body
        self.url = url


class Controller:
    """The daemon's API with plain dictionaries. New programs use `Client`, which has types.

    >>> [snapshot["tag"] for snapshot in Controller().list_snapshots() if snapshot["tag"] == tag] == [tag]
    True
    """

    def __init__(self, base_url: Optional[str] = None, token: Optional[str] = None, timeout: float = 60.0) -> None:
        self._client = Client(base_url, token, timeout)
        self.base_url = self._client.address.url
        self.timeout = timeout

    def list_snapshots(self) -> list[dict[str, Any]]:
        return self._ask("GET", "/v1/snapshots")

    def create_snapshot(
        self,
        tag: str,
        kernel: Optional[str] = None,
        rootfs: Optional[str] = None,
        rw: bool = False,
        tap: Optional[str] = None,
        boot_wait_secs: int = 10,
    ) -> dict[str, Any]:
        body = dict(tag=tag, kernel=kernel, rootfs=rootfs, rw=rw, tap=tap, boot_wait_secs=boot_wait_secs)
        return self._ask("POST", "/v1/snapshots", body=body)

    def delete_snapshot(self, tag: str) -> None:
        self._ask("DELETE", "/v1/snapshots/{tag}", tag)

    def spawn_sandboxes(
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,
        memory_limit_mib: Optional[int] = None,
        prewarm: bool = False,
        live_fork: bool = False,
        hugepages: bool = False,
    ) -> list[dict[str, Any]]:
        body: dict[str, Any] = dict(snapshot_tag=snapshot_tag, n=n, per_child_netns=per_child_netns, prewarm=prewarm)
        body.update(memory_limit_mib=memory_limit_mib, live_fork=live_fork, hugepages=hugepages)
        return self._ask("POST", "/v1/sandboxes", body=body)

    def list_sandboxes(self) -> list[dict[str, Any]]:
        return self._ask("GET", "/v1/sandboxes")

    def get_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        return self._ask("GET", "/v1/sandboxes/{id}", sandbox_id)

    def kill_sandbox(self, sandbox_id: str) -> None:
        self._ask("DELETE", "/v1/sandboxes/{id}", sandbox_id)

    def branch_sandbox(
        self,
        sandbox_id: str,
        tag: Optional[str] = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: Optional[BranchMode] = None,
        wait: bool = True,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"measure_diff": measure_diff, "wait": wait}
        if tag is not None:
            body["tag"] = tag
        if mode is not None:
            body["mode"] = mode
        elif diff:
            body["diff"] = True
        return self._ask("POST", "/v1/sandboxes/{id}/branch", sandbox_id, body=body)

    def exec_command(self, sandbox_id: str, args: list[str], timeout_secs: int = 30) -> dict[str, Any]:
        body = dict(args=args, timeout_secs=timeout_secs)
        return self._ask("POST", "/v1/sandboxes/{id}/exec", sandbox_id, body=body, patience=timeout_secs)

    def eval_code(self, sandbox_id: str, code: str) -> dict[str, Any]:
        return self._ask("POST", "/v1/sandboxes/{id}/eval", sandbox_id, body=dict(code=code), patience=30)

    def ping_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        return self._ask("POST", "/v1/sandboxes/{id}/ping", sandbox_id)

    def _ask(self, method: str, route: str, *ids: str, body: Any = None, patience: float = 0.0) -> Any:
        parse = nothing if method == "DELETE" else anything
        call = Call[Any](method, route, parse, ids=ids, body=body, repeatable=method == "GET", patience=patience)
        try:
            return self._client.send(call)
        except ForkdError as error:
            answer = dict(error=error.message, code=error.code, request_id=error.request_id)
            raise ControllerError(error.status or 0, answer, self.base_url + call.path) from error
