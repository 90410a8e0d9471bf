"""Inside a Python kernel: what it shows of tables and figures, and what changes in a forked guest.

IPython loads this as an extension. The server calls the functions below by silent executions."""

import math
import os
import random
import sys
import threading
import uuid

from . import charts

DATA = "application/vnd.forkd.data+json"
CHART = "application/vnd.forkd.chart+json"
# A larger table is shown and printed as always, but its values are not sent with it.
MAX_CELLS = 500_000

# Characters of output that are sent at once.
PIECE = 64 << 10

entered = []


def load_ipython_extension(shell):
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class Data(BaseFormatter):
        format_type = Unicode(DATA)
        print_method = ObjectName("_repr_forkd_data_")
        _return_type = dict

    class Chart(BaseFormatter):
        format_type = Unicode(CHART)
        print_method = ObjectName("_repr_forkd_chart_")
        _return_type = dict

    formatters = shell.display_formatter.formatters
    formatters[DATA] = Data(parent=shell.display_formatter)
    formatters[CHART] = Chart(parent=shell.display_formatter)
    formatters[DATA].for_type_by_name("pandas.core.frame", "DataFrame", table)
    import zmq

    socket = getattr(shell.kernel.iopub_socket, "io_thread", None)
    socket = getattr(socket, "socket", None) or shell.kernel.iopub_socket
    # A message that the server is too slow for waits here; without this it would be dropped.
    socket.setsockopt(zmq.XPUB_NODROP, 1)
    for stream in (sys.stdout, sys.stderr):
        pace(stream)


def pace(stream):
    """Lets `stream` send its output in pieces and wait for each, so that a flood of output waits for its reader
    instead of growing here or there."""
    write, lock, waiting = stream.write, threading.Lock(), 0

    def paced(text):
        nonlocal waiting
        if not isinstance(text, str):
            return write(text)
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            write(piece)
            with lock:
                waiting += len(piece)
                full = waiting >= PIECE
                if full:
                    waiting = 0
            if full:
                stream.flush()
        return len(text)

    stream.write = paced


def prepare():
    """Imports what most code uses, so that a snapshot of the guest has it in memory."""
    import matplotlib.pyplot  # noqa: F401
    import numpy  # noqa: F401
    import pandas  # noqa: F401
    from IPython import get_ipython

    charts.watch_boxes()
    # Not registered with the formatter: `%matplotlib inline` removes figures from all formatters.
    matplotlib.figure.Figure._repr_forkd_chart_ = chart
    get_ipython().run_line_magic("matplotlib", "inline")
    warm_up()


def warm_up():
    """Draws and shows once: the first figure loads fonts, the first table most of pandas."""
    import io

    import matplotlib.pyplot
    import pandas

    frame = pandas.DataFrame({"a": [1.0, 2.0]})
    frame.describe()._repr_html_()
    figure = matplotlib.pyplot.figure()
    figure.gca().plot([1, 2], [3, 4])
    figure.savefig(io.BytesIO(), format="png")
    chart(figure)
    matplotlib.pyplot.close(figure)


def export(variables):
    os.environ.update(variables)


def enter(variables):
    """Sets variables for one execution."""
    entered.append({name: os.environ.get(name) for name in variables})
    os.environ.update(variables)


def leave():
    """Sets them back to what they were."""
    while entered:
        for name, value in entered.pop().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forked(variables):
    """Makes this kernel another one than its siblings' in forked guests: random generators that are nobody's in
    particular get a new seed. Generators that user code made with a seed stay as they are."""
    export(variables)
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # The node and the time of the last id, which uuid1 counts on from.
    uuid._node = uuid._last_timestamp = None
    names = getattr(sys.modules.get("tempfile"), "_name_sequence", None)
    if names is not None:
        sys.modules["tempfile"]._name_sequence = None


def table(frame):
    """The values of a DataFrame by column."""
    if frame.size > MAX_CELLS:
        return None
    columns = {}
    for position, name in enumerate(frame.columns):
        columns[str(name)] = [plain(value) for value in frame.iloc[:, position]]
    return columns


def plain(value):
    """The value as JSON has it."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "isoformat"):
        # Not-a-time is a time, too.
        return None if value != value else value.isoformat()
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        item = value.item()
        return str(item) if type(item) is type(value) else plain(item)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return None if type(value).__name__ in ("NAType", "NaTType") else str(value)


def chart(figure):
    """What a figure shows; None if that cannot be seen. A fault here must not keep the picture from coming."""
    try:
        return charts.of_figure(figure)
    except Exception:
        return None
