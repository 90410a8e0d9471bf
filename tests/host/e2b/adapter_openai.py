"""An agent of the OpenAI Agents SDK works in a sandbox through its E2B extension, as published. Its model follows a script.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready).
"""

import asyncio
import io
import json
import os
import tempfile
from pathlib import Path

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "true"

from agents import Model, ModelResponse, RunConfig, Runner, Usage
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

CALLS = [
    {"cmd": "awk '{ n += $1 } END { print n }' numbers.txt | tee sum.txt", "yield_time_ms": 60000},
    {"cmd": "pwd; id -un; cat sum.txt; exit 3", "yield_time_ms": 60000},
]
# A guest may be slow, and these are limits of the client alone.
SLOW = {"keepalive_s": 120, "fast_op_s": 120, "cleanup_s": 120, "file_upload_s": 120, "snapshot_tar_s": 600}


class Script(Model):
    """A model that runs the commands in turn, and then says that it is done."""

    def __init__(self):
        self.turn, self.results = 0, []

    async def get_response(self, system_instructions, input, *others, **more):
        self.results = [item["output"] for item in input if item.get("type") == "function_call_output"]
        self.turn += 1
        if self.turn <= len(CALLS):
            arguments = json.dumps(CALLS[self.turn - 1])
            said = ResponseFunctionToolCall(
                name="exec_command", arguments=arguments, call_id=f"call-{self.turn}", type="function_call"
            )
        else:
            text = ResponseOutputText(text="done", annotations=[], type="output_text")
            said = ResponseOutputMessage(
                id="message", content=[text], role="assistant", status="completed", type="message"
            )
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *others, **more):
        raise NotImplementedError


def options(**more):
    return E2BSandboxClientOptions("e2b", os.environ["DRIVE_TEMPLATE"], 900, timeouts=SLOW, **more)


async def agent_runs(client):
    """The runner makes the sandbox, fills its workspace, and ends it."""
    model = Script()
    manifest = Manifest(entries={"numbers.txt": File(content=b"1\n2\n39\n")})
    agent = SandboxAgent("adder", model=model, default_manifest=manifest, capabilities=[Shell()])
    config = RunConfig(sandbox=SandboxRunConfig(client=client, options=options()))
    result = await Runner.run(agent, "Add the numbers.", run_config=config)
    assert result.final_output == "done" and len(model.results) == 2, (result, model.results)
    first, second = (str(text) for text in model.results)
    assert "42" in first and "exited with code 0" in first, first
    assert "/workspace\n" in second and "\n42" in second and "exited with code 3" in second, second


async def workspace_is_kept(client, folder):
    """A snapshot of the sandbox keeps the workspace: the next session begins with it."""
    snapshot = LocalSnapshotSpec(base_path=Path(folder))
    keep = options(workspace_persistence="snapshot", envs={"COLOUR": "blue"}, on_timeout="kill", auto_resume=False)
    session = await client.create(snapshot=snapshot, options=keep)
    async with session:
        await session.write(Path("kept.txt"), io.BytesIO(b"of the first session"))
        ran = await session.exec("echo $COLOUR; cat kept.txt; echo warned >&2; exit 5")
        assert (ran.exit_code, ran.stdout, ran.stderr) == (5, b"blue\nof the first session", b"warned\n"), ran
    state = session.state
    again = await client.resume(state)
    async with again:
        assert again.state.sandbox_id != "" and await again.running()
        assert (await again.read(Path("kept.txt"))).read() == b"of the first session"


async def main():
    client = E2BSandboxClient()
    await agent_runs(client)
    print("the agent ran", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        await workspace_is_kept(client, folder)
    print("the E2B extension of openai-agents works", flush=True)


asyncio.run(main())
# All is checked. The client's HTTP library may crash while the interpreter ends.
os._exit(0)
