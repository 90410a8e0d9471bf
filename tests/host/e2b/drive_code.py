"""Drives a daemon with the published Python client of E2B's code interpreter.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY.
"""

from e2b_code_interpreter import Sandbox

sandbox = Sandbox.create(timeout=900, envs={"SHARED": "of all"})
try:
    run = sandbox.run_code
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
    context = sandbox.create_code_context(cwd="/tmp")
    assert run("import os; os.getcwd()", context=context).text == "/tmp"
    assert run("'x' in globals()", context=context).text == "False"
    sandbox.restart_code_context(context)
    sandbox.remove_code_context(context)
    assert "in bash" in "".join(run("echo in bash", language="bash").logs.stdout)
    assert run("[1, 2].map((n) => n * 2).join()", language="javascript").text.strip("'") == "2,4"
    assert "6" in str(run("const n: number = 6; n", language="typescript").text)

    # A child has the names that its source had, and goes on by itself.
    child = sandbox.fork(count=1)[0]
    run("x = 1")
    assert child.run_code("x").text == "41" and run("x").text == "1"
    child.kill()
    sandbox.pause()
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=900)
    assert sandbox.run_code("x").text == "1"
finally:
    Sandbox.kill(sandbox.sandbox_id)
print("the published code interpreter's client works")
