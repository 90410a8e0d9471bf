# The program that the warmed interpreter runs: it evaluates what the agent sends.
#
# It speaks with the agent over two pipes, descriptors 3 (requests) and 4 (responses), each message
# a big-endian 32-bit length and that many bytes of JSON. Standard output and standard error are
# pipes too, which the agent reads: so it also gets what child processes and C code print, and what
# was printed before a crash. Standard input is empty.
#
#   {"op": "eval", "code": ...}  ->  {"result"?, "resultJson"?, "error"?, "traceback"?}
#
# A later {"op": "forked"} belongs into `serve`: the agent will send it to an interpreter that finds
# itself in a forked guest, to reseed its random generators before anybody evaluates anything.

import sys

# Python looks for modules in the working directory first. That is right for evaluated code, but a
# file of the user's called json.py must not take the place of what this program needs.
path, sys.path = sys.path, [folder for folder in sys.path if folder]

import ast
import builtins
import fcntl
import json
import linecache
import os
import signal
import traceback
import types

sys.path = path

LIMIT = 1 << 20  # characters of a result, bytes of a result as JSON
TRACEBACK_LIMIT = 64 << 10
DRIVER = "<forkd>"  # the file name this program is compiled with


def move_out_of_the_way(fd):
    """Gives the low numbers back, and keeps the pipe from child processes."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200)
    os.close(fd)
    return moved


requests = move_out_of_the_way(3)
responses = move_out_of_the_way(4)

# Evaluated code lives in a module of its own that is found as `__main__`, so that classes defined
# there can be pickled and inspected.
own_main = sys.modules["__main__"]
main = types.ModuleType("__main__")
main.__builtins__ = builtins
sys.modules["__main__"] = main
sys.argv = [""]

# One write per line instead of one per call: `-u` alone would make two for every `print`.
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(line_buffering=True, write_through=False)


class Interpreter:
    def __init__(self):
        self.pid = os.getpid()
        self.count = 0
        self.evaluating = False
        signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, number, frame):
        # One that comes too late, after the evaluation it was meant for, is dropped.
        if self.evaluating:
            raise KeyboardInterrupt

    def evaluate(self, source):
        self.count += 1
        name = "<eval %d>" % self.count
        remember(name, source)
        answer = {}
        tree = None
        try:
            tree = ast.parse(source, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            body = compile(tree, name, "exec", dont_inherit=True)
            if last is not None:
                last = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            self.evaluating = True
            exec(body, main.__dict__)
            if last is not None:
                value = eval(last, main.__dict__)
                if value is not None:
                    answer["result"] = shorten(repr(value))
                    self.evaluating = False
                    if is_json(value):
                        answer["resultJson"] = value
        except BaseException as error:
            self.evaluating = False
            answer = describe(error)
        finally:
            self.evaluating = False
        return answer

    def serve(self):
        while True:
            request = read_message()
            answer = {}
            if request.get("op") == "eval":
                answer = self.evaluate(request["code"])
            flush()
            if os.getpid() != self.pid:
                # The code called fork and this is the child coming back: the parent answers.
                os._exit(0)
            write_message(answer)


def remember(name, source):
    """Lets tracebacks show lines of evaluated code, of the newest hundred pieces at most."""
    evaluated = [known for known in linecache.cache if known.startswith("<eval ")]
    for old in evaluated[:-100]:
        del linecache.cache[old]
    if len(source) <= TRACEBACK_LIMIT:
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)


def clean(text):
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text):
    if len(text) > LIMIT:
        text = "%s... (%d characters more)" % (text[:LIMIT], len(text) - LIMIT)
    return clean(text)


def is_json(value):
    """Whether a value is made of JSON's own types, and small."""
    budget = LIMIT
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        kind = type(item)
        budget -= 1
        if kind is str:
            budget -= len(item)
        elif kind is int:
            if not -(1 << 63) <= item < 1 << 64:
                return False
        elif kind is float:
            if item != item or item in (float("inf"), float("-inf")):
                return False
        elif kind is list:
            budget -= len(item)
            if budget >= 0:
                waiting.extend((element, depth + 1) for element in item)
        elif kind is dict:
            budget -= len(item)
            if budget >= 0:
                waiting.extend((element, depth + 1) for pair in item.items() for element in pair)
                if any(type(key) is not str for key in item):
                    return False
        elif item is not None and kind is not bool:
            return False
        if budget < 0 or depth > 100:
            return False
    try:
        return len(json.dumps(value, ensure_ascii=False).encode("utf-8")) <= LIMIT
    except ValueError:
        return False  # text that is not UTF-8


def describe(error):
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = "%s.%s" % (kind.__module__, name)
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:
        message = "<its text could not be made>"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == DRIVER:
        frames = frames.tb_next
    if frames is not None and frames.tb_frame.f_code.co_filename == ast.__file__:
        frames = None  # code that cannot be read: where our parser was does not matter
    try:
        lines = "".join(traceback.format_exception(kind, error, frames))
    except BaseException:
        lines = "%s: <its traceback could not be made>\n" % name
    if len(lines) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        lines = "%s\n...\n%s" % (lines[:half], lines[-half:])
    summary = "%s: %s" % (name, message) if message else name
    return {"error": shorten(summary), "traceback": clean(lines)}


def flush():
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()
        except BaseException:
            pass
    # C code buffers for itself. Not worth loading ctypes for.
    if "ctypes" in sys.modules:
        try:
            sys.modules["ctypes"].CDLL(None).fflush(None)
        except BaseException:
            pass


def read_exactly(size):
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(requests, size - len(data))
        except KeyboardInterrupt:
            continue  # evaluated code may have put a handler of its own in place
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def read_message():
    size = int.from_bytes(read_exactly(4), "big")
    return json.loads(read_exactly(size))


def write_message(message):
    payload = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    data = len(payload).to_bytes(4, "big") + payload
    while data:
        try:
            data = data[os.write(responses, data):]
        except KeyboardInterrupt:
            continue


interpreter = Interpreter()
write_message({})
interpreter.serve()
