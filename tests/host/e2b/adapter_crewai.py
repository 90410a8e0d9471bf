"""The tools of crewai-tools for commands and files work in sandboxes, as published. No model chooses them: the tools are
called as an agent calls them. `adapter_crewai_domain.py` has the tool for Python.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready).
"""

import os

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CREWAI_TRACING_ENABLED="false")

from crewai_tools import E2BExecTool, E2BFileTool  # noqa: E402
from e2b import Sandbox  # noqa: E402

TEMPLATE = os.environ["DRIVE_TEMPLATE"]
FILE = "/home/user/work/numbers.txt"

# One sandbox that this program owns, for files and commands.
sandbox = Sandbox.create(TEMPLATE, timeout=900)
try:
    files, commands = E2BFileTool(sandbox_id=sandbox.sandbox_id), E2BExecTool(sandbox_id=sandbox.sandbox_id)
    # Its `append` fails on every server: it hands a bytearray to the client, and the client that it pins takes none.
    files.run(action="write", path=FILE, content="1\n2\n39\n")
    assert files.run(action="read", path=FILE)["content"] == "1\n2\n39\n"
    assert files.run(action="exists", path=FILE)["exists"] is True
    ran = commands.run(command="awk '{ n += $1 } END { print n, ENVIRON[\"UNIT\"] }' numbers.txt", cwd="/home/user/work", envs={"UNIT": "eggs"})
    assert (ran["exit_code"], ran["stdout"]) == (0, "42 eggs\n"), ran
    listed = files.run(action="list", path="/home/user/work")
    assert "numbers.txt" in str(listed), listed
    files.run(action="delete", path=FILE)
    assert files.run(action="exists", path=FILE)["exists"] is False
    assert sandbox.is_running(), "a tool ends no sandbox that it did not make"
finally:
    sandbox.kill()

# A sandbox of the tool's own for one call.
once = E2BExecTool(template=TEMPLATE).run(command="id -un")
assert once["stdout"] == "user\n", once
print("crewai-tools' tools for commands and files work")
