"""OpenAI Agents SDK: a hand-off is a branch of the sandbox.

The planner prepares a database in its sandbox and hands off to the tester. At that moment the sandbox is forked: the
tester works on a child, with all that the planner has prepared, and may break it. The planner's sandbox stays as it was.

    python handoff.py [SNAPSHOT]
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass

from agents import Agent, RunContextWrapper, Runner, function_tool, handoff, set_tracing_disabled
from forkd import AsyncSandbox
from scripted import ScriptedModel

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
set_tracing_disabled(True)  # traces would go to OpenAI


@dataclass
class Work:
    """The context of a run: the sandbox of the agent whose turn it is, and all sandboxes that must end."""

    sandbox: AsyncSandbox
    sandboxes: AsyncExitStack


@function_tool
async def python(context: RunContextWrapper[Work], code: str) -> str:
    """Runs Python; variables last. Returns what the code printed, or its error."""
    done = await context.context.sandbox.run_code(code, timeout=120)
    print(f"  {context.context.sandbox.id}: {code.splitlines()[-1]} -> {done.stdout.strip() or done.error}")
    return done.stdout or str(done.error)


async def branch(context: RunContextWrapper[Work]):
    """Gives the next agent a child of this moment."""
    work = context.context
    (work.sandbox,) = await work.sandbox.fork(1)
    work.sandboxes.push_async_callback(work.sandbox.kill)
    print(f"handed off to {work.sandbox.id}")


PLAN = "accounts = {'ada': 30, 'bob': 12}\nprint(accounts)"
BREAK = "accounts.clear()\nprint(accounts)"
DIVIDE = "print(sum(accounts.values()) / len(accounts))"

tester = Agent(
    name="tester",
    instructions="Try to break it.",
    tools=[python],
    model=ScriptedModel(
        ("python", {"code": BREAK}),
        ("python", {"code": DIVIDE}),
        "The mean fails when there are no accounts.",
    ),
)
planner = Agent(
    name="planner",
    instructions="Prepare the accounts, then hand off to the tester.",
    tools=[python],
    handoffs=[handoff(tester, on_handoff=branch)],
    model=ScriptedModel(("python", {"code": PLAN}), ("transfer_to_tester", {})),
)


async def main():
    async with AsyncExitStack() as sandboxes:
        source = await sandboxes.enter_async_context(await AsyncSandbox.create(SNAPSHOT))
        work = Work(source, sandboxes)
        done = await Runner.run(planner, "Is the mean of the accounts right?", context=work)
        print(f"{done.last_agent.name}: {done.final_output}")
        print("the planner's sandbox:", await source.eval("accounts"))


asyncio.run(main())
