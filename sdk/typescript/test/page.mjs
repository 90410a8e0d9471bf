// Writes the programs of pages as files here, and runs them one after the other.
//
//   node page.mjs write PAGE…   writes them, for the compiler to look at
//   node page.mjs run PAGE…     runs them; DRIVE_TAG is the snapshot that the pages call "py" and "numpy"

import { readFileSync, writeFileSync } from "node:fs";

const [what, ...pages] = process.argv.slice(2);
const tag = JSON.stringify(process.env.DRIVE_TAG ?? "py");
let count = 0;
for (const page of pages) {
  const programs = [...readFileSync(page, "utf8").matchAll(/^```[jt]s\n([\s\S]*?)^```/gm)];
  if (programs.length === 0) throw new Error(`${page} has no programs`);
  for (const [, program] of programs) {
    const name = `page-${++count}.mts`;
    writeFileSync(new URL(name, import.meta.url), program.replace(/"(py|numpy)"/g, tag));
    if (what === "run") await import(`./${name}`);
  }
}
console.log(`${count} programs: ${what === "run" ? "all ran" : "written"}`);
