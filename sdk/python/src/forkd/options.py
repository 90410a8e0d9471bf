"""Options of new sandboxes, without any network."""

from __future__ import annotations

import os
from typing import Literal, Mapping, Optional, cast

from . import requests as bodies
from .command import DEFAULT, Timeout, seconds
from .errors import InvalidRequestError
from .models import OnTimeout


BranchMode = Literal["full", "diff", "live", "disk"]
OnError = Literal["raise", "return"]


def one_of(name: str, value: str, *allowed: str) -> None:
    """Refuses another value than these."""
    if value not in allowed:
        raise InvalidRequestError(f"{name} is {value!r}: give one of {', '.join(map(repr, allowed))}")


def branch_body(tag: Optional[str], mode: BranchMode, wait: bool) -> bodies.BranchRequest:
    """The body of a request for a branch."""
    one_of("mode", mode, "full", "diff", "live", "disk")
    body: bodies.BranchRequest = {"mode": mode}
    if tag is not None:
        body["tag"] = tag
    if not wait:
        body["wait"] = False
    return body


def create_body(
    snapshot: Optional[str],
    n: int,
    timeout: Optional[float],
    idle_timeout: Optional[float],
    on_timeout: Optional[OnTimeout],
    envs: Optional[Mapping[str, str]],
    labels: Optional[Mapping[str, str]],
    network: Optional[bool],
    memory_limit_mib: Optional[int],
    image: Optional[str] = None,
    mem_size_mib: Optional[int] = None,
    vcpus: Optional[int] = None,
) -> bodies.CreateRequest:
    """The body of a request for children of a snapshot, or for one sandbox of an image."""
    body = fork_body(n, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib)
    size = {"mem_size_mib": mem_size_mib, "vcpus": vcpus}
    size = {name: value for name, value in size.items() if value is not None}
    if image is not None:
        if snapshot is not None:
            raise InvalidRequestError("give a snapshot or an image, not both")
        body.pop("n", None)
        return cast(bodies.CreateRequest, {**body, **size, "image": image})
    tag = snapshot or os.environ.get("FORKD_TAG")
    if not tag:
        raise InvalidRequestError("give the tag of a snapshot (`forkd images` lists them), or image=")
    return cast(bodies.CreateRequest, {**body, **size, "snapshot_tag": tag})


def fork_body(
    n: int,
    timeout: Optional[float] = None,
    idle_timeout: Optional[float] = None,
    on_timeout: Optional[OnTimeout] = None,
    envs: Optional[Mapping[str, str]] = None,
    labels: Optional[Mapping[str, str]] = None,
    network: Optional[bool] = None,
    memory_limit_mib: Optional[int] = None,
) -> bodies.ForkRequest:
    """The body of a request for children of a running sandbox."""
    body: bodies.ForkRequest = {"n": n}
    if timeout is not None:
        body["timeout_secs"] = seconds(timeout)
    if idle_timeout is not None:
        body["idle_timeout_secs"] = seconds(idle_timeout)
    if on_timeout is not None:
        body["on_timeout"] = on_timeout
    if envs:
        body["env"] = dict(envs)
    if labels:
        body["labels"] = dict(labels)
    if network is not None:
        body["network"] = network
    if memory_limit_mib is not None:
        body["memory_limit_mib"] = memory_limit_mib
    return body


def update_body(
    timeout: Timeout = DEFAULT,
    idle_timeout: Timeout = DEFAULT,
    on_timeout: Optional[OnTimeout] = None,
    labels: Optional[Mapping[str, str]] = None,
) -> bodies.UpdateRequest:
    """The body of a change: what is not given stays, and None removes a timeout."""
    body: bodies.UpdateRequest = {}
    if timeout is None or isinstance(timeout, (int, float)):
        body["timeout_secs"] = seconds(timeout)
    if idle_timeout is None or isinstance(idle_timeout, (int, float)):
        body["idle_timeout_secs"] = seconds(idle_timeout)
    if on_timeout is not None:
        body["on_timeout"] = on_timeout
    if labels is not None:
        body["labels"] = dict(labels)
    return body


def label_filter(labels: Optional[Mapping[str, Optional[str]]]) -> list[str]:
    """`NAME=VALUE` for each label, or `NAME` alone for any value."""
    pairs = (labels or {}).items()
    return [name if value is None else f"{name}={value}" for name, value in pairs]
