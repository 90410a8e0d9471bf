"""AutoGen's `CodeExecutor` on forkd: code blocks of a conversation run in a sandbox."""

import asyncio

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from forkd import AsyncSandbox


class ForkdCodeExecutor(CodeExecutor):
    """Runs Python blocks in the sandbox's warmed interpreter, where variables last, and shell blocks as commands."""

    def __init__(self, snapshot, timeout=120, sandbox=None):
        self.snapshot = snapshot
        self.timeout = timeout
        self.sandbox = sandbox

    async def start(self):
        if self.sandbox is None:
            self.sandbox = await AsyncSandbox.create(self.snapshot)

    async def stop(self):
        if self.sandbox is not None:
            await self.sandbox.kill()
            self.sandbox = None

    async def restart(self):
        await self.stop()
        await self.start()

    async def stop_all(self, executors):
        """Stops several, all of them also if one fails."""
        await self.sandbox.kill_all([executor.sandbox for executor in executors if executor.sandbox])

    async def fork(self, n):
        """`n` executors on children of this moment; the caller ends them with `stop_all`."""
        children = await self.sandbox.fork(n)
        return [ForkdCodeExecutor(self.snapshot, self.timeout, child) for child in children]

    async def execute_code_blocks(self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken):
        work = asyncio.ensure_future(self._run(code_blocks))
        cancellation_token.link_future(work)
        return await work

    async def _run(self, blocks):
        output = ""
        for block in blocks:
            if block.language in ("python", "py"):
                done = await self.sandbox.run_code(block.code, timeout=self.timeout)
                output += done.stdout + done.stderr + (f"{done.text}\n" if done.text else "")
                if done.error:
                    return CodeResult(1, output + str(done.error))
            elif block.language in ("sh", "bash", "shell"):
                ran = await self.sandbox.commands.run(block.code, timeout=self.timeout, check=False)
                output += ran.stdout + ran.stderr
                if ran.exit_code:
                    return CodeResult(ran.exit_code, output)
            else:
                return CodeResult(1, f"{output}no way to run {block.language!r}: write python or sh")
        return CodeResult(0, output)
