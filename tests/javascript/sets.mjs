// Sets of files: manifests, anchors, and sealed folders.
import { check, concat, same, sha256, utf8 } from "./bytes.mjs";
import * as json from "./json.mjs";
import { readSigner } from "./keys.mjs";
import { HEADER } from "./message.mjs";
import { widen } from "./quantised.mjs";
import { dtype, keyOf, openFile, openTensor, readHeader, readSealed, shape } from "./sealed.mjs";
import { readSignedLine } from "./signed.mjs";

const LIMIT = 64 * 2 ** 20;
const HISTORY = 1024;
const TYPE = "application/vnd.fastrack.manifest.v1+json";

/** The name of a file in a set: no way out of the folder, and one spelling for each. */
const fileName = (name) => {
  const short = [...name].length <= 1024 && !/[\u0000-\u001f\u007f-\u009f\\]/.test(name);
  check(short && name.split("/").every((part) => !["", ".", ".."].includes(part)), "format", `no name of a file: ${JSON.stringify(name)}`);
  return name;
};

const sealedEntry = json.object({
  file: json.id, key: json.id, kind: json.oneOf("tensor", "checkpoint", "folder", "index"), metadata: json.digest,
  sealed: json.map(json.tuple(dtype, shape, json.bytes(HEADER, HEADER)), json.string), origins: json.map(json.id, json.string),
  digests: json.map(json.digest, json.string), plain: json.map(json.tuple(dtype, shape, json.digest), json.string),
});
const otherEntry = json.object({ size: json.number(), sha256: json.digest });
const entries = json.map((entry) => {
  if (!(entry instanceof Map) || entry.has("sha256")) return otherEntry(entry);
  const read = sealedEntry(entry);
  for (const [name, origin] of read.origins) check(read.sealed.has(name) && origin !== read.file, "format", `no origin: ${name}`);
  const all = read.digests.size === read.sealed.size && [...read.digests.keys()].every((name) => read.sealed.has(name));
  check(read.digests.size === 0 || all, "format", "expected digests of all messages, or of none");
  return read;
}, fileName);

const MANIFEST = json.object({
  format: json.exactly(1), lineage: json.id, version: json.number(1), issued: json.time, files: entries,
  history: json.array(json.digest, 0, HISTORY),
});

/** A manifest, after its signature was verified: its content, and its digest. */
export async function readManifest(bytes, owner) {
  const payload = readSignedLine(bytes, LIMIT, TYPE, owner);
  const manifest = MANIFEST(json.parseCanonical(payload));
  check(manifest.history.length === Math.min(manifest.version - 1, HISTORY), "format", "a history of another length than the version");
  return { ...manifest, digest: await sha256(payload) };
}

/** An anchor: of a line, without its newline. */
export async function readAnchor(line) {
  const anchor = json.object({
    anchor: json.exactly(1), owner: json.string, lineage: json.orNull(json.id), version: json.number(), digest: json.orNull(json.digest),
  })(json.parseCanonical(utf8(line)));
  const owner = await readSigner(anchor.owner);
  check(anchor.digest === null || (anchor.lineage !== null && anchor.version > 0), "format", "expected a version and lineage of the digest");
  return { ...anchor, owner };
}

/** A new anchor of an owner's public key, with no version yet. */
export const newAnchor = (owner) => ({ owner, lineage: null, version: 0, digest: null });

/** The line of an anchor, without its newline, once a manifest was accepted and all was as listed. */
export const anchorLine = ({ owner }, { lineage, version, digest }) =>
  json.canonical({ anchor: 1, owner: owner.line, lineage, version, digest });

function accept(anchor, manifest) {
  check(anchor.lineage === null || anchor.lineage === manifest.lineage, "rollback", "a manifest of another set");
  const back = manifest.version - anchor.version;
  if (anchor.digest === manifest.digest && back === 0) return;
  if (anchor.digest === null) check(back >= 0, "rollback", `expected version ${anchor.version} or later, got ${manifest.version}`);
  else check(back > 0 && manifest.history[back - 1] === anchor.digest, "rollback", "an older manifest, or one that does not follow");
}

const alike = (one, other) => json.canonical(one) === json.canonical(other);
const sameNames = (one, other) => one.size === other.size && [...one.keys()].every((name) => other.has(name));

/** Compare a file with its entry in an authenticated list, and return it as it was read. */
async function compare(name, bytes, entry) {
  check(bytes, "rollback", `${name}: listed, and not there`);
  const listed = (holds, kind, what) => check(holds, kind, `${name}: ${what} not as listed`);
  if (entry.sha256) {
    listed(bytes.length === entry.size && (await sha256(bytes)) === entry.sha256, "authentication", "its bytes are");
    return undefined;
  }
  const file = readSealed(bytes);
  listed(file.file === entry.file && file.key === entry.key && file.kind === entry.kind, "rollback", "its ids are");
  listed(sameNames(file.sealed, entry.sealed) && sameNames(file.plain, entry.plain), "rollback", "its tensors are");
  for (const [tensor, [type, extents, header]] of entry.sealed) {
    const claim = file.sealed.get(tensor);
    const origin = entry.origins.get(tensor) ?? entry.file;
    listed(alike([claim.dtype, claim.shape, claim.origin], [type, extents, origin]), "rollback", `${tensor} is`);
    listed(same(claim.message.subarray(0, HEADER), header), "rollback", `${tensor} is`);
    if (entry.digests.size) listed((await sha256(claim.message)) === entry.digests.get(tensor), "authentication", `${tensor} is`);
  }
  for (const [tensor, [type, extents, digest]] of entry.plain) {
    const stored = file.plain.get(tensor);
    listed(alike([stored.dtype, stored.shape], [type, extents]), "rollback", `${tensor} is`);
    listed((await sha256(stored.data)) === digest, "authentication", `${tensor} is`);
  }
  listed((await sha256(utf8(json.canonical(file.metadata)))) === entry.metadata, "authentication", "its metadata are");
  return file;
}

/** Verify a folder, a `Map` from names to bytes, from an anchor on: the manifest, and the line of the anchor afterwards. */
export async function verifyFolder(files, anchor) {
  check(files.has("fastrack.manifest"), "rollback", "there is no manifest");
  const manifest = await readManifest(files.get("fastrack.manifest"), anchor.owner);
  accept(anchor, manifest);
  for (const [name, entry] of manifest.files) await compare(name, files.get(name), entry);
  return { manifest, anchor: anchorLine(anchor, manifest) };
}

/** The text of an entry of a log. */
export const logEntry = ({ lineage, version, digest }) => `fastrack/manifest@1\n${lineage}\n${version}\n${digest}\n`;

const U8 = (data) => check(data.dtype === "U8" && data.shape.length === 1, "format", "expected a vector of U8");

/** The files of a sealed folder as they were before, a `Map` from names to bytes. */
export async function openFolder(files, keys) {
  check(files.has("fastrack.folder"), "rollback", "there is no index");
  const index = await openFile(files.get("fastrack.folder"), keys, "folder");
  for (const tensor of index.sealed.values()) U8(tensor);
  check(index.plain.size === 0, "format", "expected no unencrypted tensor of the index");
  check(index.sealed.has("files"), "format", "expected a tensor files in the index");
  const list = json.object({ format: json.exactly(1), files: entries })(json.parseCanonical(index.sealed.get("files").data)).files;
  for (const name of index.sealed.keys())
    check(name === "files" || (name.startsWith("header/") && list.get(name.slice(7))?.sealed), "format", `${name}: a tensor of no file`);
  const opened = new Map();
  for (const [name, entry] of list) {
    check(!entry.plain?.size, "format", `${name}: expected no unencrypted tensor`);
    const file = await compare(name, files.get(name), entry);
    check(!file || file.key === index.key, "format", `${name}: expected the key of the index`);
    const header = index.sealed.get(`header/${name}`);
    opened.set(name, file ? await restore(name, file, header?.data, await keyOf(file, keys)) : files.get(name));
  }
  return opened;
}

/** What a sealed file of a folder was before: by its header a safetensors file, or else one vector of bytes. */
async function restore(name, file, header, key) {
  check(file.kind === "tensor", "format", `${name}: expected a file of tensors`);
  for (const claim of file.sealed.values()) claim.data = await openTensor(file, claim, key);
  if (!header) {
    const whole = file.sealed.get(name.split("/").at(-1));
    check(file.sealed.size === 1 && whole, "format", `${name}: expected one tensor, of the last part of its name`);
    U8(whole);
    return whole.data;
  }
  const { tensors, start, end } = readHeader(header);
  check(start === header.length, "format", `${name}: a header of another size`);
  const hidden = new Set(); // scales that values were widened by, which readers do not see
  const data = new Map();
  for (const [tensor, listed] of tensors) {
    const claim = file.sealed.get(tensor);
    const widened = claim?.scale && !tensors.has(claim.scale.name); // where the scales are listed too, values open as they are
    const right = claim && listed.dtype === (widened ? "BF16" : claim.dtype) && alike(listed.shape, claim.shape);
    check(right, "format", `${name}: ${tensor} is not as in the header`);
    if (widened) hidden.add(claim.scale.name);
    data.set(listed, widened ? widen(claim, claim.data, file.sealed.get(claim.scale.name).data) : claim.data);
  }
  const all = [...file.sealed.keys()].every((tensor) => tensors.has(tensor) || hidden.has(tensor));
  check(all, "format", `${name}: a tensor that is not in the header`);
  const before = concat(header, new Uint8Array(end - start)); // no more than was opened
  for (const [listed, bytes] of data) before.set(bytes, start + listed.data_offsets[0]);
  return before;
}
