// Writes the programs of pages as files here, and runs them one after the other.
//
//   node page.mjs write PAGE…   writes them, and the examples of the package's types, for the compiler to look at
//   node page.mjs run PAGE…     runs them; DRIVE_TAG is the snapshot that the pages call "py" and "numpy"

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

const [what, ...pages] = process.argv.slice(2);
const tag = JSON.stringify(process.env.DRIVE_TAG ?? "py");
let count = 0;

function write(program) {
  const name = `page-${++count}.mts`;
  writeFileSync(new URL(name, import.meta.url), program);
  return `./${name}`;
}

for (const page of pages) {
  const programs = [...readFileSync(page, "utf8").matchAll(/^```[jt]s\n([\s\S]*?)^```/gm)];
  if (programs.length === 0) throw new Error(`${page} has no programs`);
  for (const [, program] of programs) {
    const file = write(program.replace(/"(py|numpy)"/g, tag));
    if (what === "run") await import(file);
  }
}
if (what === "write") {
  const dist = dirname(createRequire(import.meta.url).resolve("@forkd/sdk"));
  for (const module of ["sandbox", "snapshot", "commands", "files"]) {
    const types = readFileSync(join(dist, `${module}.d.ts`), "utf8");
    const examples = [...types.matchAll(/^ *\* @example\n *\* ```ts\n([\s\S]*?)^ *\* ```/gm)];
    if (examples.length === 0) throw new Error(`${module}.d.ts has no examples`);
    for (const [, lines] of examples) {
      // An example is about a sandbox that is there.
      const example = lines.replace(/^ *\* ?/gm, "");
      const start = /\bsandbox = /.test(example) ? "" : "declare const sandbox: Sandbox;\n";
      write(`import { Sandbox, Snapshot } from "@forkd/sdk";\n${start}${example}`);
    }
  }
}
console.log(`${count} programs: ${what === "run" ? "all ran" : "written"}`);
