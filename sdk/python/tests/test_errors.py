"""Errors go through `pickle` and `copy`: a program passes them between processes."""

import copy
import inspect
import pickle

import pytest

import forkd
from forkd import errors, reference

CLASSES = [it for module in (errors, reference) for it in vars(module).values()
           if inspect.isclass(it) and issubclass(it, forkd.ForkdError) and it.__module__ == module.__name__]


def made(cls):
    if issubclass(cls, forkd.CommandError):
        return cls("it ended", exit_code=3, stdout="out", stderr="err", code="c")
    if issubclass(cls, forkd.EvalError):
        return cls("it raised", name="KeyError", value="'x'", traceback="line 1")
    if cls is forkd.ControllerError:
        return cls(404, {"error": "none", "code": "sandbox_not_found", "request_id": "r"}, "http://h/v1")
    return cls("why, and what to do", code="c", status=418, request_id="r")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickle_and_copy(cls):
    error = made(cls)
    error.errors, error.retry_after, error.outcome_unknown = ["one"], 1.5, True
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in [*copies, copy.copy(error), copy.deepcopy(error)]:
        assert type(other) is cls and other is not error
        assert (vars(other), str(other), other.args) == (vars(error), str(error), error.args)


def test_every_exported_error_is_looked_at():
    assert {getattr(forkd, name) for name in forkd.__all__ if name.endswith("Error")} == set(CLASSES) and len(CLASSES) > 20
