// Sealed files: safetensors, the entries of fastrack, contexts and bindings. Runs in browsers too.
import { check, concat, Refused, same, text } from "./bytes.mjs";
import * as json from "./json.mjs";
import { derive, HEADER, keyId, messageSize, openMessage, SALT } from "./message.mjs";

const BITS = new Map(
  Object.entries({
    4: "F4", 6: "F6_E2M3 F6_E3M2", 8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ", 16: "I16 U16 F16 BF16",
    32: "I32 U32 F32", 64: "I64 U64 F64 C64",
  }).flatMap(([bits, names]) => names.split(" ").map((name) => [name, Number(bits)])),
);
const GUARD = json.canonical({
  dtype: "sealed by fastrack: open it with fastrack.load_model, fastrack.safe_open or fastrack.mount_folder", shape: [0], data_offsets: [0, 0],
});
const HEADER_LIMIT = 100_000_000; // that of the safetensors library

export const dtype = json.oneOf(...BITS.keys());
/** A shape: 64 extents at most, whose product is 2⁵⁶ at most, where 0 counts as 1. */
export function shape(value) {
  const extents = json.array((extent) => (typeof extent === "bigint" ? extent : json.number()(extent)), 0, 64)(value);
  const product = extents.reduce((all, extent) => all * BigInt(extent || 1), 1n);
  check(product <= 1n << 56n, "format", "expected 2⁵⁶ elements at most");
  return extents;
}

/** The bytes of a tensor, which have to be whole ones. */
export function byteSize({ dtype: name, shape: extents }) {
  const bits = extents.reduce((all, extent) => all * BigInt(extent), BigInt(BITS.get(name)));
  check(bits % 8n === 0n, "format", `expected whole bytes, got ${bits} bits of ${name}`);
  return Number(bits / 8n);
}

/** The tensors and metadata that a safetensors header lists, without a gap or overlap, and the places where data begin and end. */
export function readHeader(bytes) {
  check(bytes.length >= 8, "format", "expected a safetensors file");
  const size = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  check(size <= Math.min(HEADER_LIMIT, bytes.length - 8), "format", "the header is longer than the file");
  const header = json.map((value) => value, json.string)(json.parse(text(bytes.subarray(8, 8 + size))));
  check(bytes[8] === 123, "format", "expected a header that begins with a brace");
  const metadata = json.map(json.string, json.string)(header.get("__metadata__") ?? new Map());
  header.delete("__metadata__");
  const guard = header.get("fastrack.guard"); // exactly this one is none, in each member; another is a tensor
  if (guard && json.canonical(guard) === GUARD) header.delete("fastrack.guard");
  const entry = json.object({ dtype, shape, data_offsets: json.tuple(json.number(), json.number()) });
  const tensors = json.map(entry, json.string)(header);
  let end = 0;
  const spans = [...tensors.values()].map((tensor) => [...tensor.data_offsets, byteSize(tensor)]);
  for (const [start, stop, bytesOf] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    check(start === end && stop - start === bytesOf, "format", "data with a gap, an overlap, or another size than their shape");
    end = stop;
  }
  return { tensors, metadata, start: 8 + size, end: 8 + size + end };
}

/** The same of a whole safetensors file, each tensor with its `data`, and nothing behind the last one. */
export function readSafetensors(bytes) {
  const header = readHeader(bytes);
  check(header.end === bytes.length, "format", "the file is longer or shorter than its header says");
  for (const tensor of header.tensors.values()) tensor.data = bytes.subarray(header.start).subarray(...tensor.data_offsets);
  return header;
}

const SCALE = json.object({ block: json.tuple(json.number(1), json.number(1)), dtype, name: json.string, shape });
const CLAIM = json.object({ dtype, shape }, { file: json.id, binding: json.hexadecimal(HEADER), scale: SCALE });

/** What a sealed file says of itself. Nothing of it is authentic before a tensor has been opened. */
export function readSealed(bytes) {
  const { tensors, metadata } = readSafetensors(bytes);
  const own = new Map([...metadata].filter(([name]) => !name.startsWith("fastrack.")));
  const ours = ["version", "file", "key", "tensors", "kind"].map((name) => metadata.get(`fastrack.${name}`));
  if (ours.every((value) => value === undefined)) return { kind: "plain", sealed: new Map(), plain: tensors, metadata: own };
  const [version, file, key, claims, kind = "tensor"] = ours;
  json.exactly("1")(version);
  json.oneOf("checkpoint", "folder", "index", undefined)(ours[4]);
  json.id(key);
  const sealed = json.map(CLAIM, json.string)(json.parse(json.string(claims)));
  for (const [name, claim] of sealed) {
    const stored = tensors.get(name);
    check(stored, "format", `${name}: listed, and not there`);
    check((claim.file === undefined) === (claim.binding === undefined), "format", `${name}: a file id and a binding come together`);
    const right = stored.dtype === "U8" && stored.shape.length === 1 && stored.data.length === messageSize(byteSize(claim));
    check(right, "format", `${name}: expected a message of its dtype and shape`);
    Object.assign(claim, { name, message: stored.data, origin: claim.file ?? json.id(file) });
    claim.context = contextOf(kind, claim);
  }
  for (const claim of sealed.values()) if (claim.scale) checkScale(claim, sealed.get(claim.scale.name));
  const plain = new Map([...tensors].filter(([name]) => !sealed.has(name)));
  return { file: json.id(file), key, kind, sealed, plain, metadata: own };
}

function contextOf(kind, { name, dtype: type, shape: extents, origin, scale }) {
  const members = { dtype: type, file: origin, name, shape: extents, ...(scale && { scale }) };
  return concat(`fastrack/${kind}@1`, 0, json.contextual(members));
}

/** The rows and columns of values: the last dimension counts columns, and all others rows. */
export const rowsAndColumns = (extents) => [extents.slice(0, -1).reduce((all, extent) => all * Number(extent), 1), Number(extents.at(-1))];

function checkScale({ name, dtype: type, shape: extents, origin, scale }, scales) {
  check(["F8_E4M3", "F8_E5M2", "I8"].includes(type) && ["F32", "BF16"].includes(scale.dtype), "format", `${name}: dtypes of no scale`);
  const [rows, columns] = rowsAndColumns(extents);
  const [high, wide] = scale.block;
  check(extents.length > 0 && high <= rows && wide <= columns, "format", `${name}: a block larger than the values`);
  const needed = Math.ceil(rows / high) * Math.ceil(columns / wide);
  check(scale.shape.reduce((all, extent) => all * Number(extent), 1) === needed, "format", `${name}: expected ${needed} scales`);
  const listed = scales && !scales.scale && scales.origin === origin && scales.dtype === scale.dtype;
  check(listed && `${scales.shape}` === `${scale.shape}`, "format", `${name}: its scales are not as listed`);
}

/** The plaintext of a sealed tensor of a file. */
export async function openTensor(file, claim, key) {
  if (claim.binding) {
    const context = concat("fastrack/binding@1", 0, file.file, 0, claim.context);
    const bound = await derive(key, claim.binding.subarray(0, SALT), context);
    check(same(bound.commitment, claim.binding.subarray(SALT)), "authentication", `${claim.name}: not bound to this file`);
  }
  return openMessage(claim.message, key, claim.context, byteSize(claim));
}

/** The key that a file is sealed under, of those that the reader has. */
export async function keyOf(file, keys) {
  for (const key of keys) if ((await keyId(key)) === file.key) return key;
  throw new Refused("unknown-key", `expected one of the keys given, got ${file.key}`);
}

/** Open a file whole: what `readSealed` returns, each sealed tensor with its plaintext in `data`. */
export async function openFile(bytes, keys, kind) {
  const file = readSealed(bytes);
  check(file.kind === kind || (file.kind === "plain" && kind === "tensor"), "format", `expected the kind ${kind}, got ${file.kind}`);
  check(kind !== "checkpoint" || file.plain.size === 0, "format", "expected no unencrypted tensor of a checkpoint");
  if (file.sealed.size === 0) return file; // to which no key belongs
  const key = await keyOf(file, keys);
  for (const claim of file.sealed.values()) claim.data = await openTensor(file, claim, key);
  return file;
}
