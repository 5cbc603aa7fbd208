// Bytes and refusals: what all modules of this reader share. Runs in browsers too.

/** A text as a terminal may have it: what is no letter, number or printable ASCII, such as ESC or a turn of direction, as JSON escapes it. */
export const printable = (text) => text.replace(/[^ -~\p{L}\p{N}]/gu, (character) => character.replace(/[^]/g, escape));
export const escape = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;

/** A refusal, whose `kind` is one of the classes in the table "Failures" of the page of the formats. */
export class Refused extends Error {
  constructor(kind, message) {
    super(printable(message)); // names in it are as those who made the file chose them
    this.kind = kind;
  }
}

/** Refuse unless a condition holds. */
export function check(holds, kind, message) {
  if (!holds) throw new Refused(kind, message);
}

/** UTF-8. A byte order mark is a character as any other, so that no two files have one text. */
export const utf8 = (text) => new TextEncoder().encode(text);
export function text(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new Refused("format", "expected UTF-8");
  }
}

/** One array of an array of several; a string stands for its UTF-8, a number for one byte. */
export function join(parts) {
  const all = parts.map((part) => (typeof part === "string" ? utf8(part) : typeof part === "number" ? [part] : part));
  const whole = new Uint8Array(all.reduce((size, part) => size + part.length, 0));
  all.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
  return whole;
}
export const concat = (...parts) => join(parts); // of few: a call takes no more than some 65,000 arguments

/** A whole number, big-endian, of some bytes; a negative one as its two's complement. */
export function big(value, size = 8) {
  const bytes = new Uint8Array(size);
  for (let at = size - 1, rest = BigInt(value); at >= 0; at--, rest >>= 8n) bytes[at] = Number(rest & 255n);
  return bytes;
}

export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
export function unhex(digits) {
  check(/^(?:[0-9a-f]{2})*$/.test(digits), "format", "expected hexadecimal in lower case");
  return Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

export function base64(bytes) {
  let binary = "";
  for (let at = 0; at < bytes.length; at += 8192) binary += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(binary);
}
/** Base64 in its canonical form: `atob` takes spaces, and bits behind the end, so the text is made again and compared. */
export function unbase64(letters) {
  let bytes;
  try {
    bytes = Uint8Array.from(atob(letters), (character) => character.charCodeAt(0));
  } catch {
    throw new Refused("format", "expected base64");
  }
  check(base64(bytes) === letters, "format", "expected base64 in canonical form");
  return bytes;
}

/** Are two arrays the same? Looks at every byte, so that the time tells nothing of the place where they differ. */
export function same(one, other) {
  let differ = one.length ^ other.length;
  for (let at = 0; at < one.length; at++) differ |= one[at] ^ other[at];
  return differ === 0;
}

export const hash = async (bytes, name = "SHA-256") => new Uint8Array(await crypto.subtle.digest(name, bytes));
export const sha256 = async (bytes) => hex(await hash(bytes));
