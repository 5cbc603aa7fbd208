// Reads every case of the test kit, and prints where this reader and the kit disagree: node kit.mjs CASES [--json]
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { base64, check, hex, printable, Refused, sha256, unbase64, unhex, utf8 } from "./bytes.mjs";
import { readDataSet } from "./data.mjs";
import { readAnswer, readChallenge, readOffer } from "./exchange.mjs";
import { openGrants } from "./grants.mjs";
import { confirm, openBlock, openRanks } from "./group.mjs";
import { canonical, parse } from "./json.mjs";
import { readKeyFile, readPublicFile, readSecretFile, readWrapped } from "./keys.mjs";
import { widen } from "./quantised.mjs";
import { openFile } from "./sealed.mjs";
import { logEntry, newAnchor, openFolder, readAnchor, verifyFolder } from "./sets.mjs";
import { readChain } from "./tours.mjs";

/** Some members of a value, bytes in hexadecimal. */
const pick = (value, names) =>
  Object.fromEntries(names.split(" ").map((name) => [name, value[name] instanceof Uint8Array ? hex(value[name]) : value[name]]));
const parts = async (tensors) => {
  const all = new Map();
  for (const [name, { dtype, shape, data }] of tensors) all.set(name, { dtype, shape, sha256: await sha256(data) });
  return all;
};
const keys = (input) => input.all("key").map(unhex);
const owners = (input) => Promise.all(input.all("owner").map((line) => readPublicFile(utf8(line))));
const secret = (input) => readSecretFile(unbase64(input.one("secret")));
const group = (input) => ({
  key: unhex(input.one("key")), within: unhex(input.all("within")[0] ?? ""), run: input.one("run"), name: input.one("group"),
  members: input.all("member").map(Number), random: input.all("random").map(unhex),
});

/** By kind: from the payload and the inputs of a case to its result. */
const KINDS = {
  async sealed(payload, input) {
    const { sealed, plain, metadata } = await openFile(payload, keys(input), input.one("as"));
    return { tensors: await parts(sealed), plain: await parts(plain), metadata };
  },
  async widened(payload, input) {
    const { sealed } = await openFile(payload, keys(input), "tensor");
    const claim = sealed.get(parse(input.one("tensor")));
    check(claim?.scale, "format", "expected quantised values");
    return { sha256: await sha256(widen(claim, claim.data, sealed.get(claim.scale.name).data)), shape: claim.shape };
  },
  "key-file": async (payload) => pick(await readKeyFile(payload), "key id"),
  "secret-file": async (payload) => {
    const pair = await readSecretFile(payload);
    return { ...pick(pair, "algorithm id"), public: base64(pair.public) };
  },
  "public-file": async (payload) => pick(await readPublicFile(payload), "algorithm id name"),
  async wrapped(payload, input) {
    const [wrapping, decrypted] = [input.one("wrapping"), input.one("decrypted")];
    const by = { wrapping: wrapping && unbase64(wrapping), decrypted: decrypted && unhex(decrypted) };
    return pick(await readWrapped(payload, by), "key id provider algorithm");
  },
  async grants(payload, input) {
    const recipient = input.one("secret") ? { secret: await secret(input) } : { passphrase: parse(input.one("passphrase")) };
    return pick(await openGrants(payload, await owners(input), recipient, input.one("time")), "key files lineage least_version expires");
  },
  async manifest(payload, input) {
    const before = input.one("anchor") ? await readAnchor(input.one("anchor")) : newAnchor((await owners(input))[0]);
    const { manifest, anchor } = await verifyFolder(input.files(payload), before);
    return { ...pick(manifest, "version digest"), files: manifest.files.size, anchor, log: logEntry(manifest) };
  },
  async folder(payload, input) {
    const files = new Map();
    for (const [name, bytes] of await openFolder(input.files(payload), keys(input))) files.set(name, await sha256(bytes));
    return { files };
  },
  "data-set": (payload, input) => readDataSet(input.files(payload), keys(input)),
  challenge: async (payload) => pick(readChallenge(payload), "id nonce expires"),
  offer: (payload, input) => readOffer(payload, unbase64(input.one("challenge")), input.one("time")),
  async answer(payload, input) {
    const opened = await readAnswer(payload, input.one("challenge"), await owners(input), await secret(input), input.one("time"));
    return { keys: opened.map(hex) };
  },
  chain: async (payload, input) => pick(await readChain(payload, (await owners(input))[0]), "visits head model complete"),
  async message(payload, input) {
    const numbers = ["number", "source", "target", "size"].map((name) => [name, Number(input.one(name))]);
    const inputs = { ...group(input), operation: input.one("operation"), dtype: input.one("dtype"), ...Object.fromEntries(numbers) };
    return { sha256: await sha256(await openRanks(payload, inputs)) };
  },
  async confirmation(payload, input) {
    await confirm(payload, { ...group(input), text: input.one("text"), rank: Number(input.one("rank")) });
    return {};
  },
  async block(payload, input) {
    const { name, data } = await openBlock(payload, unhex(input.one("key")), input.one("context"), Number(input.one("size")));
    return { name, sha256: await sha256(data) };
  },
};

/** A case: lines of names and values, an empty line, and the payload. */
function readCase(bytes) {
  const end = bytes.indexOf("\n\n");
  const lines = bytes.toString("utf8", 0, end).split("\n").map((line) => /^([a-z0-9_-]+): ?([^\n]*)$/.exec(line).slice(1));
  const all = (name) => lines.filter(([each]) => each === name).map(([, value]) => value);
  const files = (payload) => {
    let at = 0;
    return new Map(all("file").map((line) => {
      const [, size, name] = /^([0-9]+) ([^\n]*)$/.exec(line);
      return [name, payload.subarray(at, (at += Number(size)))];
    }));
  };
  return { payload: new Uint8Array(bytes.subarray(end + 2)), input: { all, one: (name) => all(name)[0], files } };
}

/** The files of an archive, ustar without compression: blocks of 512 bytes, of which a file has one for its name and size. */
function* members(archive) {
  const text = (at, size) => archive.toString("latin1", at, at + size).replace(/\0.*$/s, "");
  for (let at = 0; archive[at]; ) {
    const size = parseInt(text(at + 124, 12), 8);
    yield [text(at, 100), archive.subarray(at + 512, at + 512 + size)];
    at += 512 + Math.ceil(size / 512) * 512;
  }
}

/** What is wrong with a case, or `undefined` where this reader agrees. */
async function disagreement({ payload, input }) {
  if ((await sha256(payload)) !== input.one("sha256")) return "the payload is not the case's";
  if (input.one("kit") !== "1" || !Object.hasOwn(KINDS, input.one("kind"))) return "unknown kit or kind";
  let got, why;
  try {
    got = `success ${canonical(await KINDS[input.one("kind")](payload, input))}`;
  } catch (error) {
    got = error instanceof Refused ? error.kind : printable(`${error.stack}`); // another error is a fault of this reader
    why = printable(error.message);
  }
  const wanted = input.one("expect") === "success" ? `success ${input.one("result")}` : input.one("expect");
  return got === wanted ? undefined : `expected ${wanted}, got ${got}${why ? ` (${why})` : ""}`;
}

const [folder, option] = process.argv.slice(2);
const found = [];
const counts = {};
const digests = new Map(readFileSync(join(folder, "SHA256SUMS"), "ascii").trimEnd().split("\n").map((line) => line.split("  ").reverse()));
for (const archive of readdirSync(folder).filter((name) => name.endsWith(".tar")).sort())
  for (const [name, bytes] of members(readFileSync(join(folder, archive)))) {
    const kind = archive.slice(0, -".tar".length);
    counts[kind] = (counts[kind] ?? 0) + 1;
    const whole = digests.get(name) === (await sha256(bytes));
    digests.delete(name);
    const wrong = whole ? await disagreement(readCase(bytes)) : "the case is not that of its digest";
    if (wrong) found.push({ case: name, wrong });
  }
for (const name of digests.keys()) found.push({ case: name, wrong: "the archive of its kind does not have the case" });
const total = Object.values(counts).reduce((all, count) => all + count, 0);
if (option === "--json") console.log(JSON.stringify({ cases: total, kinds: counts, disagreements: found }));
else {
  for (const { case: name, wrong } of found) console.log(`${name}: ${wrong.length > 500 ? `${wrong.slice(0, 500)}…` : wrong}`);
  console.log(`${total} cases of ${Object.keys(counts).length} kinds, ${found.length} disagreements`);
}
process.exitCode = total === 0 || found.length ? 1 : 0; // no cases are no agreement
