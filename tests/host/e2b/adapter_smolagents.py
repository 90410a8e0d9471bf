"""A code agent of smolagents computes in a sandbox (executor_type="e2b"), as published. Its model follows a script.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY. The template is `code-interpreter-v1`.
"""

from smolagents import ActionStep, ChatMessage, CodeAgent, MessageRole, Model, tool

STEPS = [
    "numbers = [n * n for n in range(10)]\nprint('numbers:', numbers)",
    "import numpy\nnumpy.array(numbers).mean().item()",
    "1 / 0",
    "final_answer({'total': double(sum(numbers)), 'kept': numbers[3]})",
]


class Script(Model):
    """A model that writes the steps in turn."""

    def __init__(self):
        super().__init__()
        self.steps = iter(STEPS)

    def generate(self, messages, **more):
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: go on.\n<code>\n{next(self.steps)}\n</code>")


@tool
def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return number * 2


with CodeAgent(tools=[double], model=Script(), executor_type="e2b") as agent:
    answer = agent.run("Add the squares.")
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
assert answer == {"total": 570, "kept": 9}, answer
assert "numbers: [0, 1, 4" in steps[0].observations, steps[0]
assert "28.5" in steps[1].observations, steps[1]
assert "ZeroDivisionError" in str(steps[2].error), steps[2]
print("smolagents' executor works")
