// Writes the programs of a page as files here, and runs them one after the other.
//
//   node page.mjs PAGE        writes them, for the compiler to look at
//   node page.mjs PAGE run    runs them; DRIVE_TAG is the snapshot that the page calls "py" or "numpy"

import { readFileSync, writeFileSync } from "node:fs";

const [page, run] = process.argv.slice(2);
const programs = [...readFileSync(page, "utf8").matchAll(/^```[jt]s\n([\s\S]*?)^```/gm)];
if (programs.length === 0) throw new Error(`${page} has no programs`);
for (const [index, [, program]] of programs.entries()) {
  const name = `page-${index + 1}.mts`;
  writeFileSync(new URL(name, import.meta.url), program.replaceAll(/"(py|numpy)"/g, JSON.stringify(process.env.DRIVE_TAG ?? "py")));
  if (run) await import(`./${name}`);
}
if (run) console.log("all programs ran");
