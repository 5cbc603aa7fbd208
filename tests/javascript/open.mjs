// Lists the tensors of a sealed file, all opened, or writes the bytes of one: node open.mjs FILE --key KEYFILE [--tensor NAME]
import { readFileSync, writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { check, printable, Refused, sha256 } from "./bytes.mjs";
import { readKeyFile } from "./keys.mjs";
import { keyOf, openFile, openTensor, readSealed } from "./sealed.mjs";

const { values, positionals } = parseArgs({ allowPositionals: true, options: { key: { type: "string" }, tensor: { type: "string" } } });
if (positionals.length !== 1 || !values.key) {
  console.error("node open.mjs FILE --key KEYFILE [--tensor NAME]");
  process.exit(2);
}
const quoted = (name) => printable(JSON.stringify(name));
try {
  const bytes = new Uint8Array(readFileSync(positionals[0]));
  const { key } = await readKeyFile(readFileSync(values.key));
  if (values.tensor === undefined) {
    const { sealed, plain } = await openFile(bytes, [key], "tensor");
    for (const [name, { dtype, shape, data }] of sealed)
      console.log(`${quoted(name)} ${dtype} [${shape}] sealed, sha256 ${await sha256(data)}`);
    for (const [name, { dtype, shape }] of plain) console.log(`${quoted(name)} ${dtype} [${shape}] unencrypted, not authentic`);
  } else {
    const file = readSealed(bytes);
    check(file.kind === "tensor" && file.sealed.has(values.tensor), "format", "expected a sealed tensor of this name");
    writeFileSync(1, await openTensor(file, file.sealed.get(values.tensor), await keyOf(file, [key])));
  }
} catch (error) {
  console.error(printable(`${positionals[0]}: ${error instanceof Refused ? `${error.kind}: ` : ""}${error.message}`));
  process.exitCode = 1;
}
