"""N CrewAI agents on N children of one sandbox.

The parent has a trace of requests in the memory of its interpreter. Each agent of the crew has a child of that moment to
itself: all use the same variable names, and none sees another one's work. The lead compares what they report.

    python agents.py [SNAPSHOT]
"""

import os
import re
import sys

# CrewAI would send usage data to its maker.
os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CREWAI_TRACING_ENABLED="false")

from crewai import Agent, Crew, Task
from crewai.tools import BaseTool
from forkd import Sandbox
from scripted import ScriptedLLM

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
TRACE = """
import random
random.seed(5)
trace = [random.randrange(8) if random.random() < 0.7 else random.randrange(8, 200) for _ in range(5000)]

def hits(victim):
    # How many requests a cache of ten finds; `victim` chooses what it drops.
    found, cache = 0, {}
    for now, key in enumerate(trace):
        if key in cache:
            found += 1
        elif len(cache) == 10:
            del cache[victim(cache)]
        old = cache.get(key, {"came": now, "uses": 0})
        cache[key] = {"came": old["came"], "used": now, "uses": old["uses"] + 1}
    return found
"""
POLICIES = {
    "first in, first out": "victim = lambda cache: min(cache, key=lambda key: cache[key]['came'])\nhits(victim)",
    "least recently used": "victim = lambda cache: min(cache, key=lambda key: cache[key]['used'])\nhits(victim)",
    "least often used": "victim = lambda cache: min(cache, key=lambda key: cache[key]['uses'])\nhits(victim)",
}


class Python(BaseTool):
    """A tool on one sandbox."""

    name: str = "python"
    description: str = "Runs Python; variables last. Returns the value of the last expression."
    _sandbox: Sandbox

    def __init__(self, sandbox):
        super().__init__()
        self._sandbox = sandbox

    def _run(self, code: str) -> str:
        return str(self._sandbox.eval(code, timeout=120))


def best(conversation):
    """What the lead answers: the policy with the most hits of those that the conversation names."""
    return max(re.findall(r"([a-z, ]+): (\d+) hits", conversation), key=lambda found: int(found[1]))[0]


def crew_on(children):
    """A crew of one agent per child, and a lead without a sandbox."""
    agents, tasks = [], []
    for (policy, code), child in zip(POLICIES.items(), children):
        model = ScriptedLLM(model="scripted", code=code, answer=policy + ": {result} hits")
        agent = Agent(role=f"engineer on {child.id}", goal=f"Measure {policy}", backstory="", llm=model, tools=[Python(child)])
        agents.append(agent)
        tasks.append(Task(description=f"Measure {policy}.", expected_output="hits", agent=agent, async_execution=True))
    lead = Agent(role="lead", goal="Choose", backstory="", llm=ScriptedLLM(model="scripted", answer=best))
    tasks.append(Task(description="Choose a policy.", expected_output="its name", agent=lead, context=list(tasks)))
    return Crew(agents=[*agents, lead], tasks=tasks)


def main():
    with Sandbox.create(SNAPSHOT) as parent:
        parent.eval(TRACE)
        children = parent.fork(len(POLICIES))
        try:
            done = crew_on(children).kickoff()
        finally:
            parent.kill_all(children)
    for output in done.tasks_output:
        print(f"{output.agent}: {output.raw}")


if __name__ == "__main__":
    main()
