"""A ReAct agent that prepares once, is forked in the middle of its work, and goes on in three ways at the same time.

The first agent loads data into the interpreter of its sandbox. Then the sandbox is forked: three agents have the data
and the conversation so far, each with another hint. A judge takes the best answer.

    python fan_out.py [SNAPSHOT]
"""

import contextlib
import operator
import os
import sys
import time
from typing import Annotated

from forkd import Sandbox
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send
from scripted import ScriptedModel

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
TASK = "Load the readings; one in ten is a broken sensor."
LOAD = """
import random, statistics
random.seed(7)
readings = [random.gauss(20, 1) if n % 10 else 500.0 for n in range(1000)]
len(readings)
"""
TRIM = "middle = sorted(readings)[200:-200]; abs(statistics.fmean(middle) - 20)"
HINTS = {
    "Estimate with the mean.": "abs(statistics.fmean(readings) - 20)",
    "Estimate with the median.": "abs(statistics.median(readings) - 20)",
    "Estimate without the outer fifths.": TRIM,
}
MODEL = ScriptedModel(
    script={TASK: (LOAD, "{result} readings are loaded.")} | {hint: (code, "{result}") for hint, code in HINTS.items()}
)


def react(sandbox):
    """A ReAct agent (model, tool, model, …) whose tool runs Python in `sandbox`."""

    @tool
    def python(code: str) -> str:
        """Run Python; variables last. Returns the value of the last expression."""
        return str(sandbox.eval(code, timeout=120))

    model = MODEL.bind_tools([python])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([python]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


class Work(MessagesState):
    children: list[str]
    answers: Annotated[list[tuple[float, str]], operator.add]


def main():
    with contextlib.ExitStack() as sandboxes:
        source = sandboxes.enter_context(Sandbox.create(SNAPSHOT))

        def prepare(state):
            return react(source).invoke({"messages": state["messages"]})

        def fork(state):
            start = time.monotonic()
            children = source.fork(len(HINTS))
            for child in children:
                sandboxes.callback(child.kill)
            print(f"forked {len(children)} children in {time.monotonic() - start:.2f} s")
            return {"children": [child.id for child in children]}

        def fan_out(state):
            return [
                Send("way", {"messages": [*state["messages"], HumanMessage(hint)], "children": [child]})
                for hint, child in zip(HINTS, state["children"])
            ]

        def way(state):
            hint = state["messages"][-1].content
            done = react(Sandbox.connect(state["children"][0])).invoke({"messages": state["messages"]})
            return {"answers": [(float(done["messages"][-1].content), hint)]}

        def judge(state):
            for error, hint in sorted(state["answers"]):
                print(f"{error:8.3f} off: {hint}")
            return {"messages": [HumanMessage(min(state["answers"])[1])]}

        graph = StateGraph(Work)
        for node in (prepare, fork, way, judge):
            graph.add_node(node.__name__, node)
        graph.add_edge(START, "prepare")
        graph.add_edge("prepare", "fork")
        graph.add_conditional_edges("fork", fan_out, ["way"])
        graph.add_edge("way", "judge")
        graph.add_edge("judge", END)
        done = graph.compile().invoke({"messages": [HumanMessage(TASK)]})
        print("chosen:", done["messages"][-1].content)


if __name__ == "__main__":
    main()
