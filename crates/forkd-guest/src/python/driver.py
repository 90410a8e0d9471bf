# The program that the warmed interpreter runs: it evaluates what the agent sends.
#
# It speaks with the agent over two pipes, descriptors 3 (requests) and 4 (responses), each message
# a big-endian 32-bit length and that many bytes of JSON. Standard output and standard error are
# pipes too, which the agent reads: so it also gets what child processes and C code print, and what
# was printed before a crash. Standard input is empty.
#
#   {"op": "eval", "code": ...}  ->  {"result"?, "resultJson"?, "error"?, "traceback"?, "wakes"}
#
# In a forked guest the agent puts a notice into a third pipe, descriptor 6, and sends NOTICE while
# the process is still frozen: so it is read first, in the middle of an evaluation too. A notice is a
# length as above and that many bytes: variables for the environment, NAME=value, each ended by a NUL.
# What it leads to is in `Forks`. An interpreter that only waits for a request, with no thread and no
# function that a fork concerns, keeps the signal from itself until then: waking up just to hear the
# news would cost every child a megabyte of copied memory. "wakes" says that this is not so: then the
# agent lets this process run before all others, until HEARD comes through descriptor 7.

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
NOTICE = 60  # the signal that comes with a notice; the agent knows it too, and the two below
HEARD = b"h"  # all notices were read, and what they lead to is done
REGISTERED = b"r"  # there is a function now


def move_out_of_the_way(fd):
    """Gives the low numbers back, and keeps the pipe from child processes."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200)
    os.close(fd)
    return moved


requests = move_out_of_the_way(3)
responses = move_out_of_the_way(4)
notices = move_out_of_the_way(6)
replies = move_out_of_the_way(7)

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


class Forks:
    """What an interpreter does first when it finds itself in a forked guest.

    Every sibling has the same memory, and with it the same random generators. Those that belong to
    nobody in particular are reseeded. A generator that somebody made and seeded, such as
    `random.Random(42)` or `numpy.random.default_rng(42)`, is left as it is: they asked for the same
    numbers every time. Code with anything else of its own registers a function:

        import forkd_guest
        forkd_guest.on_fork(function)
    """

    def __init__(self):
        self.functions = []
        self.news = False  # the signal came, and its notice was not looked for yet
        self.reading = False
        module = types.ModuleType("forkd_guest", "What code in this interpreter can know of forks.")
        module.on_fork = self.on_fork
        sys.modules["forkd_guest"] = module
        signal.signal(NOTICE, self.notice)

    def on_fork(self, function):
        """Calls `function()` in every fork of this guest, in the order of registration.

        Returns the function, so that it can be used as a decorator."""
        if not callable(function):
            raise TypeError("on_fork takes a function, not %s" % type(function).__name__)
        self.functions.append(function)
        if len(self.functions) == 1:
            os.write(replies, REGISTERED)
        return function

    def can_wait(self):
        """Whether nothing here can notice when the news comes: no thread, no function to call."""
        return not self.functions and len(sys._current_frames()) == 1

    def notice(self, number=NOTICE, frame=None):
        # The signal may come at any point below, too. Then this runs inside itself, and must neither read
        # what is half read nor leave a notice behind.
        self.news = True
        heard = False
        try:
            while self.news and not self.reading:
                self.reading = True
                try:
                    self.news = False
                    while bytes_waiting(notices):
                        heard = True
                        self.read_notice()
                finally:
                    self.reading = False
        finally:
            if heard:
                os.write(replies, HEARD)

    def read_notice(self):
        size = int.from_bytes(read_exactly(4, notices), "big")
        for variable in read_exactly(size, notices).split(b"\0"):
            name, equals, value = variable.partition(b"=")
            if equals:
                os.environb[name] = value
        for function in [reseed_random, reseed_numpy, reseed_openssl, renew_uuid, renew_tempfile]:
            attempt(function)
        for function in list(self.functions):
            attempt(function)


def attempt(function):
    try:
        function()
    except KeyboardInterrupt:
        raise  # meant for the evaluation that this came into
    except BaseException as error:
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        text = "forkd: %s failed in a forked guest\n%s" % (name, describe(error)["traceback"])
        # Past the stream, which may be in the middle of something.
        os.write(2, text.encode("utf-8"))


# Only what is loaded: what is imported later starts with what is right then.


def reseed_random():
    if "random" in sys.modules:
        sys.modules["random"]._inst.seed()


def reseed_numpy():
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def reseed_openssl():
    if "_ssl" in sys.modules:
        sys.modules["_ssl"].RAND_add(os.urandom(64), 64.0)


def renew_uuid():
    uuid = sys.modules.get("uuid")
    if uuid is not None:
        # Siblings have one hardware address: a random node instead, with the bit that says so.
        uuid._node = int.from_bytes(os.urandom(6), "big") | 1 << 40
        uuid._last_timestamp = None
        uuid._generate_time_safe = None  # the system's library knows nothing of that node


def renew_tempfile():
    if "tempfile" in sys.modules:
        sys.modules["tempfile"]._name_sequence = None


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
        answer = {}  # that this is ready
        while True:
            answer["wakes"] = not forks.can_wait()
            if not answer["wakes"]:
                signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE])
            write_message(answer)
            request = read_message()
            forks.notice()  # also if evaluated code has taken the signal for itself
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOTICE])
            answer = {}
            if request.get("op") == "eval":
                answer = self.evaluate(request["code"])
            flush()
            if os.getpid() != self.pid:
                # The code called fork and this is the child coming back: the parent answers.
                os._exit(0)


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


def bytes_waiting(pipe):
    FIONREAD = 0x541B
    return int.from_bytes(fcntl.ioctl(pipe, FIONREAD, bytes(4)), sys.byteorder)


def read_exactly(size, pipe):
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(pipe, size - len(data))
        except KeyboardInterrupt:
            continue  # evaluated code may have put a handler of its own in place
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def read_message():
    size = int.from_bytes(read_exactly(4, requests), "big")
    return json.loads(read_exactly(size, requests))


def write_message(message):
    payload = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    data = len(payload).to_bytes(4, "big") + payload
    while data:
        try:
            data = data[os.write(responses, data):]
        except KeyboardInterrupt:
            continue


forks = Forks()
interpreter = Interpreter()
interpreter.serve()
