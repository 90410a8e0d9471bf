// Drives a daemon with the published npm client of E2B's code interpreter.
//
// Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY.

import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/code-interpreter'

// A kernel takes its time to start in an emulated machine.
const sandbox = await Sandbox.create({ timeoutMs: 3600_000, requestTimeoutMs: 900_000 })
try {
  assert.equal((await sandbox.runCode('1 + 1')).text, '2')
  const lines = []
  const done = await sandbox.runCode("print('out')", { onStdout: (line) => lines.push(line.line) })
  assert.deepEqual([done.logs.stdout, lines.length], [['out\n'], 1])
  assert.equal((await sandbox.runCode('1 / 0')).error.name, 'ZeroDivisionError')
  const context = await sandbox.createCodeContext({ cwd: '/tmp' })
  assert.equal((await sandbox.runCode('import os; os.getcwd()', { context })).text, '/tmp')
  const script = await sandbox.runCode('[1, 2].map((n) => n * 2).join()', { language: 'javascript', timeoutMs: 900_000 })
  assert.match(script.text, /2,4/)
} finally {
  await sandbox.kill()
}
console.log("the published code interpreter's npm client works")
