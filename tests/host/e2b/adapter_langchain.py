"""A deep agent of LangChain works in a sandbox through langchain-e2b, as published. Its model follows a script.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready).
"""

import os

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_e2b import E2BSandbox

FILE = "/home/user/total.py"
CALLS = [
    ("write_file", {"file_path": FILE, "content": "print(sum(range(10)))\n"}),
    ("execute", {"command": f"python3 {FILE}"}),
    ("edit_file", {"file_path": FILE, "old_string": "10", "new_string": "101"}),
    ("read_file", {"file_path": FILE}),
    ("execute", {"command": "python3 total.py; echo failed >&2; exit 3"}),
    ("grep", {"pattern": "sum(range", "path": "/home/user", "output_mode": "content"}),
    ("ls", {"path": "/home/user"}),
]


class Script(GenericFakeChatModel):
    """A model that calls the tools in turn, and then says that it is done."""

    def bind_tools(self, tools, **more):
        return self


def script():
    for index, (name, arguments) in enumerate(CALLS):
        yield AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{index}"}])
    yield AIMessage("done")


sandbox = Sandbox.create(os.environ["DRIVE_TEMPLATE"], timeout=900)
try:
    agent = create_deep_agent(model=Script(messages=script()), backend=E2BSandbox(sandbox=sandbox))
    messages = agent.invoke({"messages": [{"role": "user", "content": "Add the numbers."}]})["messages"]
    results = [str(message.content) for message in messages if isinstance(message, ToolMessage)]
    assert len(results) == len(CALLS) and messages[-1].content == "done", messages
    wrote, ran, edited, read, failed, found, listed = results
    assert "45" in ran, ran
    assert "sum(range(101))" in read, read
    assert "5050" in failed and "failed" in failed and "3" in failed, failed
    assert FILE in found and FILE in listed, (found, listed)
    assert sandbox.files.read(FILE) == "print(sum(range(101)))\n", (wrote, edited)
finally:
    sandbox.kill()
print("langchain-e2b works")
