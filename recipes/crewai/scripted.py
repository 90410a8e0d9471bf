"""A model for CrewAI that follows a script, so that the program here needs no API key."""

import json

from crewai import BaseLLM


class ScriptedLLM(BaseLLM):
    """Runs `code` with the tool `python` once, then answers with `answer`.

    `{result}` in `answer` stands for what the tool returned. Without code the model answers at once; `answer` may then
    be a function of the conversation.
    """

    code: str = ""
    answer: object = "{result}"

    def call(self, messages, *args, **kwargs):
        # CrewAI appends what the tool returned to the message of the model that called it.
        called = [message["content"] for message in messages if message["role"] == "assistant"]
        if self.code and not called:
            return f"Thought: I try it.\nAction: python\nAction Input: {json.dumps({'code': self.code})}"
        if callable(self.answer):
            answer = self.answer(messages[-1]["content"])
        else:
            answer = self.answer.format(result=called[-1].rpartition("Observation:")[2].strip())
        return f"Thought: I know the answer.\nFinal Answer: {answer}"

    def supports_function_calling(self):
        return False

    def get_input_tokens_count(self, *args, **kwargs):
        return 0
