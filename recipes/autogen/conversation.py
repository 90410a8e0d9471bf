"""A conversation of AutoGen agents that is branched in the middle: the words and the sandbox.

A coder writes code blocks, a runner runs them in a sandbox. After the first task the program saves the state of the team
and forks the sandbox. Two teams load that state, each on a child, and go on with different tasks. Both change the list
of prices in place; neither sees the other's change.

    python conversation.py [SNAPSHOT]
"""

import asyncio
import os
import sys
import warnings

from autogen_agentchat.agents import AssistantAgent, CodeExecutorAgent
from autogen_agentchat.conditions import SourceMatchTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.replay import ReplayChatCompletionClient
from executor import ForkdCodeExecutor

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
LOAD = "```python\nprices = [9, 11, 10, 12, 8, 500]\nprint(len(prices), 'prices')\n```"
DROP = "```python\nprices.remove(max(prices))\nprint('mean', sum(prices) / len(prices))\n```"
CLIP = "```python\nprices[:] = [min(price, 20) for price in prices]\nprint('mean', sum(prices) / len(prices))\n```"
# The sandbox is the wall around the code: no approval is asked.
warnings.filterwarnings("ignore", message=".*approval_func.*")


def team(executor, *script):
    """A coder that writes what the script has, and a runner with this executor."""
    coder = AssistantAgent("coder", ReplayChatCompletionClient(list(script)))
    runner = CodeExecutorAgent("runner", executor)
    return RoundRobinGroupChat([coder, runner], termination_condition=SourceMatchTermination(["runner"]))


async def ask(team, task):
    done = await team.run(task=task)
    answer = done.messages[-1].content.strip()
    print(f"{task} -> {answer}")
    return answer


async def way(executor, state, task, code):
    """One way to go on: a team that knows the conversation so far, on a child of the sandbox."""
    branched = team(executor, code)
    await branched.load_state(state)
    return await ask(branched, task)


async def main():
    async with ForkdCodeExecutor(SNAPSHOT) as executor:
        first = team(executor, LOAD)
        await ask(first, "Load the prices.")
        state = await first.save_state()
        children = await executor.fork(2)
        try:
            await asyncio.gather(
                way(children[0], state, "Drop the outlier.", DROP),
                way(children[1], state, "Clip the outlier.", CLIP),
            )
        finally:
            await executor.stop_all(children)
        print("in the first sandbox:", await executor.sandbox.eval("prices"))


asyncio.run(main())
