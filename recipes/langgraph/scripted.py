"""A chat model that follows a script, so that the programs here need no API key and print the same every time."""

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class ScriptedModel(BaseChatModel):
    """Answers the last human message: each tool call of its script, one after the other, then the last text.

    `script` maps a human message to Python code for the tool `python` and a final text.
    """

    script: dict[str, tuple[str, str]]

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        last = max(at for at, message in enumerate(messages) if isinstance(message, HumanMessage))
        code, text = self.script[messages[last].content]
        answers = messages[last + 1 :]
        if answers:
            reply = AIMessage(text.format(result=answers[-1].content))
        else:
            call = {"name": "python", "args": {"code": code}, "id": f"call-{last}"}
            reply = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=reply)])
