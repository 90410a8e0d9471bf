"""Runs the examples of docstrings and of pages against a daemon."""

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import types

import forkd


def docstrings():
    """Every docstring of the package that has examples: (name, text)."""
    for found in pkgutil.iter_modules(forkd.__path__):
        module = __import__("forkd." + found.name, fromlist=["x"])
        things = [(found.name, module)]
        while things:
            name, thing = things.pop()
            text = inspect.getdoc(thing) or ""
            if ">>>" in text and not inspect.ismodule(thing):
                yield name, text
            if inspect.ismodule(thing):
                things += [(f"{name}.{k}", v) for k, v in vars(thing).items()
                           if getattr(v, "__module__", None) == module.__name__]
            elif inspect.isclass(thing):
                things += [(f"{name}.{k}", getattr(v, "__func__", v)) for k, v in vars(thing).items()
                           if callable(getattr(v, "__func__", v))]


def run_docstrings(box, tag):
    """Runs them with `sandbox`, which already runs, and `tag`, its snapshot. Returns how many there are."""
    count = 0
    loop = asyncio.new_event_loop()
    try:
        for name, text in sorted(docstrings()):
            values = dict(vars(forkd), tag=tag, asyncio=asyncio, sandbox=box)
            module = sys.modules["forkd." + name.split(".")[0]]
            values.update((k, v) for k, v in vars(module).items() if k not in ("sandbox", "asyncio"))
            if ".Async" in name:
                values["sandbox"] = loop.run_until_complete(forkd.AsyncSandbox.connect(box.id))
            for example in doctest.DocTestParser().get_examples(text):
                got = run(example.source, values, loop)
                if not doctest.OutputChecker().check_output(example.want, got, 0):
                    raise AssertionError((name, example.source, "wanted", example.want, "got", got))
                count += 1
    finally:
        loop.run_until_complete(forkd.async_client.default_async_client().close())
        loop.close()
    return count


def run(source, values, loop):
    """Runs an example as the interpreter does, with `await`, and returns what it prints."""
    printed = io.StringIO()
    code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(printed):
        # `displayhook` shows the value, and would also bind `_`.
        if code.co_flags & inspect.CO_COROUTINE:
            loop.run_until_complete(types.FunctionType(code, values)())
        else:
            exec(code, values)
    return printed.getvalue()


def run_page(page, tag):
    """Runs the programs of a page, one after the other, in one namespace; `"py"` or `"numpy"` is the snapshot there. What a program
    prints must be the block of text behind it, if there is one."""
    text = page.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, re.M | re.S)
    values = {"__name__": "__page__"}
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            for program, wanted in blocks:
                program = re.sub('"(py|numpy)"', repr(tag), program)
                if "forkd_sandbox" in program:
                    run_pytest(program, tag)
                    continue
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(program, str(page), "exec"), values)
                if wanted and printed.getvalue() != wanted:
                    raise AssertionError((program, "wanted", wanted, "got", printed.getvalue()))
        finally:
            os.chdir(before)
            for value in values.values():
                if isinstance(value, forkd.Sandbox):
                    value.kill()
    return len(blocks)


def run_pytest(program, tag):
    """Runs a module of tests, which gets its sandboxes from the plug-in."""
    path = pathlib.Path("test_page.py")
    path.write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = dict(os.environ, FORKD_TEST_SNAPSHOT=tag)
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode != 0:
        raise AssertionError(ran.stdout + ran.stderr)
