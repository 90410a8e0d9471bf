"""What came of Python code in a sandbox, without any network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from .errors import EvalError, EvalTimeoutError
from .models import EvalReply


@dataclass(frozen=True)
class Execution:
    """The outcome of `run_code`: `value` is the value of the last expression, `text` its `repr`."""

    text: Optional[str]
    value: Any
    stdout: str
    stderr: str
    error: Optional[EvalError]


def value_of(reply: EvalReply) -> Any:
    """The value: itself if JSON has its type, else its `repr`."""
    error = error_of(reply)
    if error is not None:
        raise error
    return reply.result if reply.result_json is None else reply.result_json


def execution_of(reply: EvalReply) -> Execution:
    error = error_of(reply)
    value = None if error else (reply.result if reply.result_json is None else reply.result_json)
    return Execution(reply.result, value, reply.stdout, reply.stderr, error)


def error_of(reply: EvalReply) -> Optional[EvalError]:
    """The exception of the code, if it raised one."""
    if reply.error is None and reply.exit_code == 0:
        return None
    sentence = reply.error or f"the evaluation ended with {reply.exit_code}"
    name, colon, value = sentence.partition(": ")
    if not colon or not name.replace(".", "").isidentifier():
        name, value = sentence.split(":")[0] if sentence.isidentifier() else "", sentence
    group = EvalTimeoutError if reply.exit_code == 124 else EvalError
    return group(sentence, name=name, value=value, traceback=reply.traceback or "")
