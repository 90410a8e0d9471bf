// The official TypeScript client of the Model Context Protocol against forkd: over standard input and output, and over
// HTTP. Started by mcp.rs from a folder that has nothing but the client.

import { strict as assert } from "node:assert";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const { FORKD_URL: url, FORKD_TOKEN: token, DRIVE_TAG: tag, PATH, HOME } = process.env;
const authorization = { Authorization: `Bearer ${token}` };

async function sandboxes() {
  const reply = await fetch(`${url}/v1/sandboxes`, { headers: authorization });
  return (await reply.json()).map((sandbox) => sandbox.id);
}

async function session(transport, close) {
  const client = new Client({ name: "drive", version: "1" });
  await client.connect(transport);
  const call = async (name, args) => {
    const result = await client.callTool({ name, arguments: args }, undefined, { timeout: 120_000 });
    assert(!result.isError, JSON.stringify(result));
    return result;
  };
  const { tools } = await client.listTools();
  assert.equal(tools.length, 19);
  const tool = (name) => tools.find((one) => one.name === name);
  assert(tool("read_file").annotations.readOnlyHint && tool("kill_sandbox").annotations.destructiveHint);
  const spawned = await call("spawn_sandboxes", { snapshot_tag: tag });
  const sandbox_id = spawned.structuredContent.result[0].id;
  assert.equal(JSON.parse(spawned.content[0].text).id, sandbox_id);
  const ran = await call("run_code", { sandbox_id, code: "print('hello')\n6 * 7" });
  assert.equal(ran.content[0].text, "stdout:\nhello\n\nvalue:\n42");
  const uri = `forkd://sandboxes/${sandbox_id}/files/etc/os-release`;
  assert.match((await client.readResource({ uri })).contents[0].text, /Debian/);
  const failed = await client.callTool({ name: "ping_sandbox", arguments: { sandbox_id: "sb0none" } });
  assert(failed.isError && failed.content[0].text.startsWith("sandbox_not_found: "), JSON.stringify(failed));
  await assert.rejects(client.callTool({ name: "rm_rf", arguments: {} }), /there is no tool/);
  assert((await sandboxes()).includes(sandbox_id));
  await close(client);
  for (let i = 0; i < 200 && (await sandboxes()).includes(sandbox_id); i++) {
    await new Promise((done) => setTimeout(done, 50));
  }
  assert(!(await sandboxes()).includes(sandbox_id), "the session ends what it made");
}

const stdio = new StdioClientTransport({
  command: "forkd",
  args: ["mcp"],
  env: { PATH, HOME, FORKD_URL: url, FORKD_TOKEN: token },
});
await session(stdio, (client) => client.close());
const options = { requestInit: { headers: authorization } };
const http = new StreamableHTTPClientTransport(new URL(`${url}/mcp`), options);
await session(http, async (client) => {
  await http.terminateSession();
  await client.close();
});
const refused = new StreamableHTTPClientTransport(new URL(`${url}/mcp`), {
  requestInit: { headers: { Authorization: "Bearer wrong" } },
});
await assert.rejects(new Client({ name: "drive", version: "1" }).connect(refused), /401|[Uu]nauthorized/);
console.log("the TypeScript client works");
