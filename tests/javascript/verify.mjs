// Verifies a published folder, and moves an anchor forward: node verify.mjs FOLDER --owner PUBFILE [--anchor FILE]
import { chmodSync, lstatSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { check, printable, Refused, text } from "./bytes.mjs";
import { readPublicFile } from "./keys.mjs";
import { newAnchor, readAnchor, verifyFolder } from "./sets.mjs";

const { values, positionals } = parseArgs({ allowPositionals: true, options: { owner: { type: "string" }, anchor: { type: "string" } } });
if (positionals.length !== 1 || !values.owner) {
  console.error("node verify.mjs FOLDER --owner PUBFILE [--anchor FILE]");
  process.exit(2);
}
const [folder] = positionals;
/** What is at a path of the folder, if anything is: a file of its own. A link, even of a folder on the way, would lead elsewhere. */
function find(name) {
  const parts = name.split("/");
  for (const at of parts.keys()) {
    const found = lstatSync(join(folder, ...parts.slice(0, at + 1)), { throwIfNoEntry: false });
    if (!found) return undefined;
    check(at < parts.length - 1 ? found.isDirectory() : found.isFile(), "format", `${name}: expected a file, and no link`);
  }
  return join(folder, name);
}
/** The files of the folder, one in memory at a time. */
const files = {
  has: (name) => find(name) !== undefined,
  get: (name) => (files.has(name) ? new Uint8Array(readFileSync(find(name))) : undefined),
};
try {
  const owner = await readPublicFile(readFileSync(values.owner));
  // A missing anchor is an error: one that was made again would accept any version.
  const before = values.anchor ? await readAnchor(text(readFileSync(values.anchor)).replace(/\n$/, "")) : newAnchor(owner);
  check(before.owner.line === owner.line, "signature", "the anchor is of another owner");
  const { manifest, anchor } = await verifyFolder(files, before);
  if (values.anchor) {
    rmSync(`${values.anchor}.new`, { force: true });
    writeFileSync(`${values.anchor}.new`, `${anchor}\n`, { flag: "wx", mode: 0o600 });
    chmodSync(`${values.anchor}.new`, statSync(values.anchor).mode & 0o777);
    renameSync(`${values.anchor}.new`, values.anchor); // whole, or as it was
  }
  console.log(`${printable(folder)}: version ${manifest.version} of ${manifest.files.size} files`);
  console.log(`lineage: ${manifest.lineage}\ndigest: ${manifest.digest}`);
} catch (error) {
  console.error(printable(`${folder}: ${error instanceof Refused ? `${error.kind}: ` : ""}${error.message}`));
  process.exitCode = 1;
}
