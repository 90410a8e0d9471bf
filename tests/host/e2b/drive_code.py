"""Drives a daemon with the published Python client of E2B's code interpreter.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY.
"""

import e2b
from e2b_code_interpreter import Sandbox

SHOWS = {
    "markdown": "IPython.display.Markdown('# m')",
    "latex": "IPython.display.Latex('$x$')",
    "svg": "IPython.display.SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')",
    "jpeg": "IPython.display.Image(b'\\xff\\xd8\\xff\\xe0', format='jpeg')",
    "json": "IPython.display.JSON({'a': [1]})",
    "javascript": "IPython.display.Javascript('1')",
    "html": "IPython.display.HTML('<b>h</b>')",
}

# A kernel takes its time to start in an emulated machine.
SLOW = {"timeout": 3600, "request_timeout": 900}
sandbox = Sandbox.create(**SLOW, envs={"SHARED": "of all"})
try:
    run = sandbox.run_code
    warm = run("import sys; sorted({'numpy', 'pandas', 'matplotlib.pyplot'} & set(sys.modules))")
    assert warm.text == "['matplotlib.pyplot', 'numpy', 'pandas']", "the kernel is warm"
    assert run("1 + 1").text == "2"
    streamed = []
    done = run("import sys; print('out'); print('err', file=sys.stderr)", on_stdout=lambda it: streamed.append(it.line))
    assert done.logs.stdout == ["out\n"] and done.logs.stderr == ["err\n"] and streamed, (done, streamed)
    run("x = 41")
    assert run("x + 1").text == "42", "names stay"
    failed = run("1 / 0")
    assert failed.error.name == "ZeroDivisionError" and "Traceback" in failed.error.traceback, failed
    assert run("import os; os.environ['SHARED']").text == "of all"
    assert run("import os; os.environ['ONE']", envs={"ONE": "1"}).text == "1"
    table = run("import pandas; pandas.DataFrame({'a': [1, 2]})").results[0]
    assert table.html and table.data == {"a": [1, 2]}, table
    chart = run("import matplotlib.pyplot as plt; plt.plot([1, 2], [3, 4]); plt.title('T'); plt.show()").results[0]
    assert chart.png and chart.chart.title == "T" and chart.chart.elements[0].points, chart
    run("import IPython")
    for kind, code in SHOWS.items():
        shown = getattr(run(code).results[0], kind)
        assert shown, (kind, shown)
    # A time-out of the client interrupts the execution, and the names stay.
    try:
        run("while True: pass", timeout=3)
        raise AssertionError("an execution out of time raises")
    except e2b.TimeoutException:
        pass
    assert run("x").text == "41"
    context = sandbox.create_code_context(cwd="/tmp")
    assert run("import os; x = 5; os.getcwd()", context=context).text == "/tmp"
    assert run("x", context=context).text == "5" and run("x").text == "41", "each context has its own names"
    assert context.id in [it.id for it in sandbox.list_code_contexts()]
    sandbox.restart_code_context(context)
    assert run("'x' in globals()", context=context).text == "False" and run("x").text == "41"
    sandbox.remove_code_context(context)
    assert context.id not in [it.id for it in sandbox.list_code_contexts()]
    try:
        run("1", context=context)
        raise AssertionError("a removed context is not found")
    except e2b.SandboxException:
        pass
    assert "in bash" in "".join(run("echo in bash", language="bash", timeout=900).logs.stdout)
    assert run("[1, 2].map((n) => n * 2).join()", language="javascript", timeout=900).text.strip("'") == "2,4"
    assert "6" in str(run("const n: number = 6; n", language="typescript", timeout=900).text)

    # A child has the names that its source had, and goes on by itself.
    child = sandbox.fork(count=1)[0]
    run("x = 1")
    assert child.run_code("x").text == "41" and run("x").text == "1"
    draws = "import random, numpy; (random.random(), numpy.random.rand())"
    assert child.run_code(draws).text != run(draws).text, "the generators of both differ"
    child.kill()
    snapshot = sandbox.create_snapshot()
    again = Sandbox.create(snapshot.snapshot_id, **SLOW)
    assert again.run_code("x").text == "1"
    again.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    sandbox.pause()
    sandbox = Sandbox.connect(sandbox.sandbox_id, **SLOW)
    assert sandbox.run_code("x").text == "1"

    # After a pause without memory it boots, and the code interpreter starts again, with the sandbox's variables.
    assert sandbox.run_code("open('kept', 'w').write('on disk')").text == "7"
    sandbox.pause(keep_memory=False)
    sandbox = Sandbox.connect(sandbox.sandbox_id, **SLOW)
    fresh = sandbox.run_code("(open('kept').read(), 'x' in globals())", timeout=900, request_timeout=900)
    assert fresh.text == "('on disk', False)", fresh
    variables = sandbox.run_code("import os; (os.environ['SHARED'], os.environ['E2B_SANDBOX_ID'])")
    assert variables.text == f"('of all', '{sandbox.sandbox_id}')", variables
    assert sandbox.run_code("import os; 'FORKD_READY_FILE' in os.environ").text == "False"
finally:
    Sandbox.kill(sandbox.sandbox_id)
print("the published code interpreter's client works")
