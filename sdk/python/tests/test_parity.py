"""The client and docs/openapi.json: every route has a method, and every field and error code is there."""

import asyncio
import dataclasses
import inspect
import json
import os
import pathlib
import re
import types
import typing

import pytest

import forkd
from forkd import async_client, async_commands, async_files, async_sandbox, async_snapshot, client, commands, e2b, errors
from forkd import files, models, requests, routes, sandbox, snapshot, sse

ROOT = pathlib.Path(os.environ.get("FORKD_SOURCES") or pathlib.Path(__file__).parents[3])
DOCUMENT = json.loads((ROOT / "docs/openapi.json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
# Older names of parameters, which new programs do not use.
OLDER = {"gone", "owner"}
# What the client builds of these itself, over a WebSocket.
MESSAGES = {"ClientMessage", "ServerEvent", "ErrorBody"}


def operations():
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            if not operation.get("deprecated"):
                yield method.upper(), path, operation


def calls():
    """A call of every function in `routes`, by method and path."""
    found = {}
    for name, route in vars(routes).items():
        if not inspect.isfunction(route) or name in ("new_key", "_key") or route.__module__ != "forkd.routes":
            continue
        values = []
        for parameter in inspect.signature(route).parameters.values():
            if parameter.default is parameter.empty:
                values.append({"body": {}, "content": b""}.get(parameter.name, "x"))
        call = route(*values)
        found.setdefault((call.method, call.route), []).append((name, route, call))
    events = sse.EventLines.call(None, None, None, True)
    found[events.method, events.route] = [("events", client.Client.events, events)]
    return found


CALLS = calls()


@pytest.mark.parametrize("method, path", [(method, path) for method, path, _ in operations()])
def test_every_route_has_a_method_in_both_clients(method, path):
    for name, _, _ in CALLS[method, path]:
        assert hasattr(forkd.Client, name) and hasattr(forkd.AsyncClient, name)


def test_the_client_has_no_route_that_the_document_has_not():
    known = {(method, path) for method, path, _ in operations()}
    assert set(CALLS) == known


@pytest.mark.parametrize("method, path, operation", list(operations()))
def test_every_parameter_of_a_query_can_be_given(method, path, operation):
    parameters = operation.get("parameters", [])
    wanted = {p["name"] for p in parameters if p["in"] == "query"} - OLDER
    sent = set()
    for _, _, call in CALLS[method, path]:
        sent |= set(call.query)
    assert wanted <= sent, (wanted - sent)
    assert sent <= wanted | OLDER
    needs_key = any(p["name"] == "Idempotency-Key" for p in parameters)
    assert not needs_key or all("idempotency-key" in call.headers for _, _, call in CALLS[method, path])


def properties(schema):
    """The fields of a schema, with those of the parts it consists of: name → (required, type)."""
    if "$ref" in schema:
        return properties(SCHEMAS[schema["$ref"].split("/")[-1]])
    fields = {}
    for part in schema.get("allOf", []):
        fields.update(properties(part))
    required = schema.get("required", [])
    fields.update({name: (name in required, type_of(field)) for name, field in schema.get("properties", {}).items()})
    return fields


def type_of(schema):
    """The type of a schema, as text: such as `list[str]`, `None | int`, or the name of an object."""
    if "$ref" in schema:
        name = schema["$ref"].split("/")[-1]
        enum = SCHEMAS[name].get("enum")
        return union(map(repr, enum)) if enum and name != "ErrorCode" else "str" if name == "ErrorCode" else name
    if "oneOf" in schema:
        return union(type_of(part) for part in schema["oneOf"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return union(type_of(dict(schema, type=one)) for one in kind)
    if kind == "array":
        return "list[%s]" % type_of(schema["items"])
    if kind == "object":
        # An object of which the document says nothing is any JSON.
        return "dict[%s]" % type_of(schema["additionalProperties"]) if "additionalProperties" in schema else "Any"
    plain = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", None: "Any"}
    return plain[kind]


def type_here(hint):
    """The same of an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return union(map(type_here, arguments))
    if origin is typing.Literal:
        return union(map(repr, arguments))
    if origin is list:
        return "list[%s]" % type_here(*arguments)
    if origin is dict:
        assert arguments[0] is str
        return "dict[%s]" % type_here(arguments[1])
    return {type(None): "None", typing.Any: "Any"}.get(hint) or hint.__name__


def union(types):
    parts = sorted({part for text in types for part in text.split(" | ")})
    return "Any" if "Any" in parts else " | ".join(parts)


def test_types_are_told_apart():
    for hint, schema in [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (typing.Optional[int], {"type": ["integer", "null"]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, str], {"type": "object", "additionalProperties": {"type": "string"}}),
        (models.OnTimeout, {"$ref": "#/components/schemas/OnTimeout"}),
        (models.SandboxInfo, {"oneOf": [{"$ref": "#/components/schemas/SandboxInfo"}]}),
    ]:
        assert type_here(hint) == type_of(schema)
    assert len({type_here(hint) for hint in (str, int, float, typing.Optional[int], list[int], models.Tree, models.OnTimeout)}) == 7


def test_every_type_of_the_document_is_in_the_client():
    for name in set(SCHEMAS) - MESSAGES - {"ErrorCode"}:
        assert hasattr(models, name) or hasattr(requests, name), name


@pytest.mark.parametrize("name", [name for name in SCHEMAS if dataclasses.is_dataclass(getattr(models, name, None))])
def test_the_fields_of_a_reply_are_those_of_the_document(name):
    cls = getattr(models, name)
    hints = typing.get_type_hints(cls)
    required = {f.name: f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(cls)}
    assert {name: (required[name], type_here(hints[name])) for name in required} == properties(SCHEMAS[name])


@pytest.mark.parametrize("name", [name for name in SCHEMAS if hasattr(requests, name)])
def test_the_fields_of_a_request_are_those_of_the_document(name):
    # The package imports some names only for type checkers.
    names = {**vars(models), **vars(requests), "NotRequired": typing.NotRequired}
    hints = typing.get_type_hints(getattr(requests, name), None, names, include_extras=True)
    here = {}
    for field, hint in hints.items():
        optional = typing.get_origin(hint) is typing.NotRequired or (name, field) == ("MoveRequest", "user")
        hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.NotRequired else hint
        here[field] = (not optional, type_here(hint))
    assert here == properties(SCHEMAS[name])


@pytest.mark.parametrize("name", [name for name, schema in SCHEMAS.items() if schema.get("enum") and name != "ErrorCode"])
def test_the_values_of_a_type_are_those_of_the_document(name):
    assert list(getattr(models, name).__args__) == SCHEMAS[name]["enum"]


def test_every_error_code_has_a_class():
    codes = re.findall(r"^\| `(\w+)` \| \d+ \|", SCHEMAS["ErrorCode"]["description"], re.M)
    assert len(codes) > 60 and set(codes) == set(errors.BY_CODE)
    assert set(SCHEMAS["ErrorCode"].get("enum", codes)) == set(codes)


def test_the_version_is_that_of_the_workspace():
    workspace = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
    project = (ROOT / "sdk/python/pyproject.toml").read_text()
    assert forkd.__version__ == workspace and f'version = "{workspace}"' in project


def test_no_document_installs_the_distribution_of_the_reference():
    places = ("*.md", "docs/**/*.md", "sdk/*/README.md", "examples/**/*.md", "recipes/**/*.md")
    pages = [page for place in places for page in ROOT.glob(place)]
    assert len(pages) > 10
    for page in pages:
        assert not re.search(r"pip3? install (-\S+ )*forkd(?![\w-])", page.read_text()), page


PAIRS = [
    (client.Client, async_client.AsyncClient),
    (sandbox.Sandbox, async_sandbox.AsyncSandbox),
    (snapshot.Snapshot, async_snapshot.AsyncSnapshot),
    (commands.Commands, async_commands.AsyncCommands),
    (commands.CommandHandle, async_commands.AsyncCommandHandle),
    (files.Files, async_files.AsyncFiles),
    (e2b.Sandbox, e2b.AsyncSandbox),
]


@pytest.mark.parametrize("sync, of_asyncio", PAIRS)
def test_asyncio_has_the_same_methods_with_the_same_parameters(sync, of_asyncio):
    def names(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    extra, here_only = {"run_blocking"}, {"connect"} if sync is client.Client else set()
    assert names(of_asyncio) - extra == names(sync) - here_only
    for name in names(sync) - here_only:
        here, there = vars(sync)[name], vars(of_asyncio)[name]
        here, there = (getattr(it, "__func__", it) for it in (here, there))
        if inspect.isfunction(here):
            assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters), name
            assert here.__doc__ or name in ("pid",), name


def test_a_boot_has_the_size_that_is_asked_for(server, client):
    async def use():
        async with async_client.AsyncClient(server.url) as client:
            await forkd.AsyncSandbox.create(image="python", mem_size_mib=128, vcpus=2, client=client)

    forkd.Sandbox.create(image="python", mem_size_mib=128, vcpus=2, client=client)
    asyncio.run(use())
    forkd.Sandbox.create(image="python", client=client)
    assert [request.json for request in server.requests] == [
        dict(image="python", mem_size_mib=128, vcpus=2), dict(image="python", mem_size_mib=128, vcpus=2), dict(image="python")]


def test_the_parameters_of_the_reference_are_kept():
    assert str(inspect.signature(forkd.Sandbox)).replace("'", "") == (
        "(tag: Optional[str] = None, target: Optional[str] = None, timeout: float = 30, *, spawn: bool = True) -> None")
    wanted = {
        "list_snapshots": [],
        "delete_snapshot": ["tag"],
        "spawn_sandboxes": ["snapshot_tag", "n", "per_child_netns", "memory_limit_mib", "prewarm", "live_fork", "hugepages"],
        "list_sandboxes": [],
        "get_sandbox": ["sandbox_id"],
        "kill_sandbox": ["sandbox_id"],
        "branch_sandbox": ["sandbox_id", "tag", "diff", "measure_diff", "mode", "wait"],
        "exec_command": ["sandbox_id", "args", "timeout_secs"],
        "eval_code": ["sandbox_id", "code"],
        "ping_sandbox": ["sandbox_id"],
    }
    for name, parameters in wanted.items():
        assert list(inspect.signature(getattr(forkd.Controller, name)).parameters)[1:] == parameters
