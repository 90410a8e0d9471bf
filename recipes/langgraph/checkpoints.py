"""A branch of the sandbox for each checkpoint of a LangGraph graph, and time travel with both.

LangGraph's checkpoints hold the state of the graph. What its nodes did to a sandbox is not in them: going back to an
earlier checkpoint leaves the sandbox in the future. The saver below branches the sandbox with each checkpoint, and
`travel` rolls it back to the moment of one.

    python checkpoints.py [SNAPSHOT]
"""

import os
import sys
import time
from typing import TypedDict

from forkd import Sandbox
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")


class BranchingSaver(InMemorySaver):
    """Keeps checkpoints in memory, and with each a branch of `sandbox`."""

    def __init__(self, sandbox):
        super().__init__()
        self.sandbox = sandbox
        self.branches = {}

    def put(self, config, checkpoint, metadata, new_versions):
        start = time.monotonic()
        branch = self.sandbox.branch(wait=False)
        self.branches[checkpoint["id"]] = branch
        print(f"  checkpoint {metadata['step']}: branched in {time.monotonic() - start:.2f} s")
        return super().put(config, checkpoint, metadata, new_versions)

    def travel(self, config):
        """Rolls the sandbox back to the moment of a checkpoint."""
        self.sandbox.rollback(self.branches[config["configurable"]["checkpoint_id"]].tag)

    def delete_branches(self):
        for branch in reversed(self.branches.values()):
            branch.delete()


class State(TypedDict):
    keep: str
    answer: str


def main():
    with Sandbox.create(SNAPSHOT) as sandbox:

        def load(state):
            sandbox.eval("orders = [('open', 3), ('paid', 5), ('open', 4)]")

        def clean(state):
            sandbox.eval(f"orders = [order for order in orders if order[0] == {state['keep']!r}]")

        def report(state):
            return {"answer": str(sandbox.eval("sum(order[1] for order in orders)"))}

        graph = StateGraph(State)
        graph.add_sequence([load, clean, report])
        graph.add_edge(START, "load")
        graph.add_edge("report", END)
        saver = BranchingSaver(sandbox)
        graph = graph.compile(checkpointer=saver)
        config = {"configurable": {"thread_id": "one"}}
        # durability="sync": a checkpoint is taken before the next node starts, not beside it.
        try:
            first = graph.invoke({"keep": "paid"}, config, durability="sync")
            print("paid:", first["answer"])
            before_clean = next(past for past in graph.get_state_history(config) if past.next == ("clean",))
            saver.travel(before_clean.config)
            other = graph.update_state(before_clean.config, {"keep": "open"}, as_node="load")
            second = graph.invoke(None, other, durability="sync")
            print("open, from the same moment:", second["answer"])
        finally:
            saver.delete_branches()


if __name__ == "__main__":
    main()
