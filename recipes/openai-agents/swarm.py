"""Swarm in one page: agents are functions and a script, a hand-off is a function that returns an agent.

The loop below is the whole framework. When a function returns another agent, the sandbox is forked and the other agent
goes on in the child. So every hand-off is a moment to which the program can return: here the triage agent hands off to
two specialists in turn, and the second one does not see what the first one did.

    python swarm.py [SNAPSHOT]
"""

import contextlib
import os
import sys
from dataclasses import dataclass

from forkd import Sandbox

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")


@dataclass
class Agent:
    name: str
    model: object  # (conversation) -> a text, or the call of a function as (function, arguments)


def run(agent, sandbox, conversation, sandboxes):
    """Takes turns until a model answers with text, and returns the agent, its sandbox and the text."""
    while True:
        turn = agent.model(conversation)
        if isinstance(turn, str):
            return agent, sandbox, turn
        function, arguments = turn
        result = function(sandbox, *arguments)
        if isinstance(result, Agent):
            (sandbox,) = sandbox.fork(1)
            sandboxes.callback(sandbox.kill)
            agent, result = result, f"{result.name} goes on in {sandbox.id}"
        print(f"  {result}")
        conversation = [*conversation, result]


def script(*turns):
    """A model that takes these turns, one after the other. A real one would ask an API."""
    remaining = iter(turns)
    return lambda conversation: next(remaining)


def shell(sandbox, command):
    done = sandbox.commands.run(command, cwd="/root", check=False)
    return f"{sandbox.id}$ {command}: {(done.stdout + done.stderr).strip()}"


def to_cleaner(sandbox):
    return Agent("cleaner", script((shell, ["rm *.tmp; echo *"]), "The temporary files are removed."))


def to_archivist(sandbox):
    return Agent("archivist", script((shell, ["tar -cf all.tar *.tmp *.txt && tar -tf all.tar | xargs"]), "All is archived."))


with contextlib.ExitStack() as sandboxes:
    desk = sandboxes.enter_context(Sandbox.create(SNAPSHOT))
    prepare = (shell, ["touch a.tmp b.tmp c.txt && echo *"])
    for turns in [(prepare, (to_cleaner, [])), ((to_archivist, []),)]:
        agent, sandbox, text = run(Agent("triage", script(*turns)), desk, ["Tidy up."], sandboxes)
        print(f"{agent.name}: {text}")
    print(shell(desk, "echo *"))
