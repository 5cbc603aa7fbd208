// Verifies a published folder, and moves an anchor forward: node verify.mjs FOLDER --owner PUBFILE [--anchor FILE]
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { check, Refused, text } from "./bytes.mjs";
import { readPublicFile } from "./keys.mjs";
import { newAnchor, readAnchor, verifyFolder } from "./sets.mjs";

const { values, positionals } = parseArgs({ allowPositionals: true, options: { owner: { type: "string" }, anchor: { type: "string" } } });
if (positionals.length !== 1 || !values.owner) {
  console.error("node verify.mjs FOLDER --owner PUBFILE [--anchor FILE]");
  process.exit(2);
}
const [folder] = positionals;
/** The files of the folder, one in memory at a time. */
const files = {
  has: (name) => existsSync(join(folder, name)),
  get: (name) => (files.has(name) ? new Uint8Array(readFileSync(join(folder, name))) : undefined),
};
try {
  const owner = await readPublicFile(readFileSync(values.owner));
  // A missing anchor is an error: one that was made again would accept any version.
  const before = values.anchor ? await readAnchor(text(readFileSync(values.anchor)).replace(/\n$/, "")) : newAnchor(owner);
  check(before.owner.line === owner.line, "signature", "the anchor is of another owner");
  const { manifest, anchor } = await verifyFolder(files, before);
  if (values.anchor) {
    writeFileSync(`${values.anchor}.new`, `${anchor}\n`);
    renameSync(`${values.anchor}.new`, values.anchor); // whole, or as it was
  }
  console.log(`${folder}: version ${manifest.version} of ${manifest.files.size} files\nlineage: ${manifest.lineage}\ndigest: ${manifest.digest}`);
} catch (error) {
  console.error(`${folder}: ${error instanceof Refused ? `${error.kind}: ` : ""}${error.message}`);
  process.exitCode = 1;
}
