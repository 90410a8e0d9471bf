"""A model for the OpenAI Agents SDK that follows a script, so that the program here needs no API key."""

import json

from agents import Model, ModelResponse, Usage
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText


class ScriptedModel(Model):
    """Takes the next step of its script in each turn: a text, or a call as (name of the tool, its arguments)."""

    def __init__(self, *script):
        self.script = iter(script)
        self.calls = 0

    async def get_response(self, *args, **kwargs):
        step = next(self.script)
        self.calls += 1
        if isinstance(step, str):
            text = ResponseOutputText(annotations=[], text=step, type="output_text")
            item = ResponseOutputMessage(id="text", content=[text], role="assistant", status="completed", type="message")
        else:
            name, arguments = step
            call_id = f"{id(self)}-{self.calls}"
            item = ResponseFunctionToolCall(
                arguments=json.dumps(arguments), call_id=call_id, name=name, type="function_call"
            )
        return ModelResponse(output=[item], usage=Usage(), response_id=None)

    def stream_response(self, *args, **kwargs):
        raise NotImplementedError("the script does not stream")
