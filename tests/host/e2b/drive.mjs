// Drives a daemon with the published npm client of E2B, unmodified: every call of it that forkd serves.
//
// Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready). DRIVE_LACKS has the
// words for what this version of the client does not have: `fork`, `order` of lists, `attributes` of files, and `reboot`,
// a pause without memory.

import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import {
  AuthenticationError,
  CommandExitError,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  Template,
  TimeoutError,
} from 'e2b'

const template = process.env.DRIVE_TEMPLATE
const lacks = (process.env.DRIVE_LACKS ?? '').split(' ')
const mark = { drive: 'a b&c=ü', run: randomBytes(4).toString('hex') }
const until = async (what, look) => {
  for (let turn = 0; turn < 200; turn += 1) {
    if (await look()) return
    await sleep(200)
  }
  assert.fail(`waited in vain for ${what}`)
}

async function commands(sandbox) {
  const done = await sandbox.commands.run('id -un; pwd; echo $FOO $SHARED; echo err >&2', { envs: { FOO: 'bar' } })
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['user\n/home/user\nbar of all\n', 'err\n', 0])
  const root = await sandbox.commands.run('id -un; pwd', { user: 'root', cwd: '/tmp' })
  assert.equal(root.stdout, 'root\n/tmp\n')
  await assert.rejects(sandbox.commands.run('exit 7'), (error) => error instanceof CommandExitError && error.exitCode === 7)
  await assert.rejects(sandbox.commands.run('sleep 60', { timeoutMs: 1000 }), TimeoutError)
  const pieces = []
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true, onStdout: (piece) => pieces.push(piece) })
  await sandbox.commands.sendStdin(cat.pid, 'typed\n')
  await sandbox.commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'typed\n')
  assert.equal(pieces.join(''), 'typed\n')
  const sleeper = await sandbox.commands.run('sleep 600', { background: true })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === sleeper.pid))
  const again = await sandbox.commands.connect(sleeper.pid)
  assert.equal(await sandbox.commands.kill(sleeper.pid), true)
  assert.equal(await sandbox.commands.kill(999999), false)
  await assert.rejects(sleeper.wait(), CommandExitError)
  await assert.rejects(again.wait(), CommandExitError)
}

async function terminal(sandbox) {
  let seen = ''
  const pty = await sandbox.pty.create({ cols: 80, rows: 24, onData: (data) => (seen += Buffer.from(data).toString()) })
  await sandbox.pty.resize(pty.pid, { cols: 100, rows: 40 })
  await sandbox.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit 0\n'))
  await pty.wait()
  assert.match(seen, /40 100/)
}

async function files(sandbox) {
  assert.equal((await sandbox.files.write('hello.txt', 'hello world')).path, '/home/user/hello.txt')
  assert.equal(await sandbox.files.read('hello.txt'), 'hello world')
  const binary = randomBytes(1 << 20)
  await sandbox.files.write('/home/user/a/b.bin', new Blob([binary]))
  assert.ok(Buffer.from(await sandbox.files.read('a/b.bin', { format: 'bytes' })).equals(binary))
  await sandbox.files.write('empty', '')
  assert.equal(await sandbox.files.read('empty'), '')
  const many = await sandbox.files.write([0, 1, 2].map((n) => ({ path: `many/${n}`, data: `${n}` })))
  assert.deepEqual(many.map((file) => file.path), [0, 1, 2].map((n) => `/home/user/many/${n}`))
  assert.deepEqual((await sandbox.files.list('many')).map((entry) => entry.name).sort(), ['0', '1', '2'])
  assert.equal(await sandbox.files.makeDir('many'), false)
  assert.equal((await sandbox.files.rename('many/0', 'zero')).path, '/home/user/zero')
  const info = await sandbox.files.getInfo('zero')
  assert.deepEqual([info.size, info.owner], [1, 'user'])
  await sandbox.files.remove('zero')
  assert.equal(await sandbox.files.exists('zero'), false)
  await assert.rejects(sandbox.files.read('zero'), NotFoundError)
  await assert.rejects(sandbox.files.read('many'), InvalidArgumentError)
  const events = []
  const watch = await sandbox.files.watchDir('many', (event) => events.push(`${event.type} ${event.name}`))
  await sandbox.files.write('many/new', 'x')
  await until('an event', () => events.includes('create new'))
  await watch.stop()
  const signed = await sandbox.downloadUrl('hello.txt', { useSignatureExpiration: 60 })
  assert.equal(await (await fetch(signed)).text(), 'hello world')
  assert.equal((await fetch(signed.replace('hello.txt', 'other.txt'))).status, 401)
  const form = new FormData()
  form.append('file', new Blob(['of a stranger']), 'sent.txt')
  const upload = await sandbox.uploadUrl('sent.txt', { useSignatureExpiration: 60 })
  const sent = await (await fetch(upload, { method: 'POST', body: form })).json()
  assert.equal(sent[0].path, '/home/user/sent.txt')
  assert.equal(await sandbox.files.read('sent.txt'), 'of a stranger')
}

async function attributes(sandbox) {
  const text = 'packed'.repeat(1000)
  await sandbox.files.write('packed', text, { gzip: true, metadata: { kind: 'test' } })
  assert.equal(await sandbox.files.read('packed', { gzip: true }), text)
  const info = await sandbox.files.getInfo('packed')
  assert.deepEqual([info.size, info.metadata.kind], [text.length, 'test'])
}

async function control(sandbox) {
  const found = []
  const pages = Sandbox.list({ query: { metadata: mark, state: ['running', 'paused'] }, limit: 1 })
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  assert.deepEqual(found.map((it) => it.sandboxId), [sandbox.sandboxId])
  const info = await sandbox.getInfo()
  assert.deepEqual(info.metadata, mark)
  await sandbox.setTimeout(3600_000)
  assert.ok((await sandbox.getInfo()).endAt - info.startedAt > 3000_000)
  const metrics = await sandbox.getMetrics()
  assert.ok(metrics.at(-1).memTotal > 1 << 20)
  const snapshot = await sandbox.createSnapshot()
  const again = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 600_000 })
  assert.equal(await again.files.read('hello.txt'), 'hello world')
  await again.kill()
  const listed = []
  const snapshots = Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId })
  while (snapshots.hasNext) listed.push(...(await snapshots.nextItems()))
  assert.deepEqual(listed.map((it) => it.snapshotId), [snapshot.snapshotId])
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  assert.equal(await Template.exists(template), true)
  assert.equal(await Template.exists('no-such-template'), false)
  await assert.rejects(Sandbox.create('no-such-template'), /forkd snapshot/)
  await assert.rejects(Sandbox.getInfo('sb0000000000000000'), NotFoundError)
  await assert.rejects(Sandbox.create(template, { apiKey: 'e2b_wrong_key_that_is_long_enough' }), AuthenticationError)
}

// A second sandbox, the younger one in lists: its time-out pauses it, and a request resumes it.
async function lives(sandbox) {
  const lifecycle = { onTimeout: 'pause', autoResume: true }
  const younger = await Sandbox.create(template, { timeoutMs: 900_000, metadata: mark, lifecycle })
  try {
    const listed = async (order) => {
      const found = await Sandbox.list({ query: { metadata: mark }, ...order }).nextItems()
      return found.map((it) => it.sandboxId)
    }
    const both = [sandbox.sandboxId, younger.sandboxId]
    assert.deepEqual(await listed(), [...both].reverse(), 'the newest is first')
    if (!lacks.includes('order')) assert.deepEqual(await listed({ order: 'asc' }), both)
    await younger.files.write('mark', 'here')
    await younger.setTimeout(0)
    await until('the pause at the time-out', async () => (await younger.getInfo()).state === 'paused')
    assert.equal(await younger.files.read('mark'), 'here')
    assert.equal((await younger.getInfo()).state, 'running')
  } finally {
    await younger.kill()
  }
}

// A third one, without a network: it may live for a day, and then ends at once.
async function closed() {
  const alone = await Sandbox.create(template, { timeoutMs: 600_000, allowInternetAccess: false })
  try {
    const carrier = await alone.commands.run('cat /sys/class/net/eth0/carrier')
    assert.equal(carrier.stdout, '0\n', 'its network card is connected to nothing')
    await alone.setTimeout(24 * 3600_000)
    const info = await alone.getInfo()
    assert.ok(info.endAt - info.startedAt > 23 * 3600_000)
    await alone.setTimeout(0)
    await until('the end at the time-out', async () => !(await alone.isRunning()))
  } finally {
    await alone.kill()
  }
}

async function fork(sandbox) {
  await sandbox.commands.run('mkdir -p /dev/shm && echo in memory > /dev/shm/mark')
  const [child] = await sandbox.fork({ count: 1, timeoutMs: 600_000 })
  assert.ok(child instanceof Sandbox, String(child))
  assert.notEqual(child.sandboxId, sandbox.sandboxId)
  await sandbox.commands.run('echo changed > /dev/shm/mark')
  assert.equal(await child.files.read('/dev/shm/mark'), 'in memory\n')
  await child.kill()
}

async function pause(sandbox) {
  const before = await sandbox.files.read('/proc/sys/kernel/random/boot_id')
  const sleeper = await sandbox.commands.run('sleep 3000', { background: true, timeoutMs: 0 })
  assert.equal(await sandbox.pause(), true)
  assert.equal(await Sandbox.pause(sandbox.sandboxId), false)
  assert.equal(await sandbox.isRunning(), false)
  const resumed = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 900_000 })
  assert.equal(await resumed.files.read('/proc/sys/kernel/random/boot_id'), before)
  assert.ok((await resumed.commands.list()).some((process) => process.pid === sleeper.pid))
  return resumed
}

// A pause of the file system alone: the sandbox boots anew on its files.
async function reboot(sandbox) {
  const before = await sandbox.files.read('/proc/sys/kernel/random/boot_id')
  await sandbox.commands.run('echo on disk > ~/kept; mkdir -p /dev/shm && echo in memory > /dev/shm/lost')
  assert.equal(await sandbox.pause({ keepMemory: false }), true)
  const booted = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 900_000 })
  assert.notEqual(await booted.files.read('/proc/sys/kernel/random/boot_id'), before)
  assert.equal(await booted.files.read('kept'), 'on disk\n')
  assert.equal(await booted.files.exists('/dev/shm/lost'), false)
  assert.equal((await booted.commands.run('echo $SHARED')).stdout, 'of all\n')
  return booted
}

let sandbox = await Sandbox.create(template, { timeoutMs: 900_000, metadata: mark, envs: { SHARED: 'of all' } })
try {
  assert.equal(await sandbox.isRunning(), true)
  for (const part of [commands, terminal, files, attributes, control, lives, closed, fork, pause, reboot]) {
    if (lacks.includes(part.name)) continue
    sandbox = (await part(sandbox)) ?? sandbox
    console.log(`${part.name}: works`)
  }
  const endless = await sandbox.commands.run('sleep 6000', { background: true, timeoutMs: 0 })
  // Early versions return nothing.
  assert.notEqual(await sandbox.kill(), false)
  // Its streams end at once.
  const end = endless.wait().then(() => 'without an error', (error) => error)
  const first = await Promise.race([end, sleep(30_000, 'not at all', { ref: false })])
  assert.ok(first instanceof Error, `the stream of a killed sandbox ends ${first}`)
  assert.equal(await sandbox.isRunning(), false)
} finally {
  await Sandbox.kill(sandbox.sandboxId).catch(() => {})
}
console.log('the published npm client works')
