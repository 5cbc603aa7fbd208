// JSON, strictly: `JSON.parse` takes a member twice and does not tell `1` from `1.0`. Runs in browsers too.
import { check, escape, Refused, text as decode, unbase64, unhex } from "./bytes.mjs";

const DEPTH = 128; // of arrays and objects in one another, so that a hostile text does not exhaust the stack
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;

/** A number that is not whole, negative, of 18 digits or more, or spelled in another way than in digits. No form takes it. */
class OddNumber {
  constructor(spelling) {
    this.spelling = spelling;
  }
}

/** Parse a text of one JSON value. An object is a `Map`, which keeps its order whatever the names. */
export function parse(source) {
  let at = 0;
  const wrong = (expected) => new Refused("format", `JSON, at character ${at}: expected ${expected}`);
  const take = (sign) => {
    while (at < source.length && " \t\n\r".includes(source[at])) at++;
    if (!source.startsWith(sign, at)) return false;
    at += sign.length;
    return true;
  };
  const want = (sign) => {
    if (!take(sign)) throw wrong(sign);
  };

  function string() {
    let end = at - 1;
    for (let slashes = 1; slashes % 2; ) {
      end = source.indexOf('"', end + 1);
      if (end < 0) throw wrong("the end of a string");
      for (slashes = 0; source[end - 1 - slashes] === "\\"; ) slashes++;
    }
    const inside = source.slice(at, end);
    let value;
    try {
      value = JSON.parse(`"${inside}"`); // one string alone, whose escapes it knows
    } catch {
      throw wrong("a string");
    }
    if (!value.isWellFormed()) throw wrong("no lone surrogate");
    at = end + 1;
    return value;
  }

  function object(depth) {
    const members = new Map();
    if (take("}")) return members;
    do {
      want('"');
      const name = string();
      if (members.has(name)) throw wrong("each member once");
      want(":");
      members.set(name, any(depth));
    } while (take(","));
    want("}");
    return members;
  }

  function array(depth) {
    const items = [];
    if (take("]")) return items;
    do items.push(any(depth));
    while (take(","));
    want("]");
    return items;
  }

  function any(depth) {
    if (depth > DEPTH) throw wrong(`at most ${DEPTH} arrays and objects in one another`);
    if (take('"')) return string();
    if (take("{")) return object(depth + 1);
    if (take("[")) return array(depth + 1);
    for (const [word, value] of [["true", true], ["false", false], ["null", null]]) if (take(word)) return value;
    NUMBER.lastIndex = at;
    const spelling = NUMBER.exec(source)?.[0];
    if (spelling === undefined) throw wrong("a value");
    at += spelling.length;
    if (!/^[0-9]{1,17}$/.test(spelling)) return new OddNumber(spelling);
    return Number.isSafeInteger(Number(spelling)) ? Number(spelling) : BigInt(spelling); // 2⁵³ + 1 is not 2⁵³
  }

  const value = any(0);
  take("");
  if (at !== source.length) throw wrong("the end");
  return value;
}

/** Python sorts names by code points; JavaScript would sort them by halves of surrogate pairs. */
function byCodePoint([one], [other]) {
  const [a, b] = [[...one], [...other]];
  const at = a.findIndex((character, place) => character !== b[place]);
  if (at < 0) return a.length - b.length;
  return at < b.length ? a[at].codePointAt(0) - b[at].codePointAt(0) : 1;
}

function write(value, quote) {
  if (typeof value === "string") return quote(value);
  if (value instanceof OddNumber) return value.spelling;
  if (Array.isArray(value)) return `[${value.map((item) => write(item, quote)).join(",")}]`;
  if (value === null || typeof value !== "object") return String(value);
  const members = (value instanceof Map ? [...value] : Object.entries(value)).sort(byCodePoint);
  return `{${members.map(([name, member]) => `${quote(name)}:${write(member, quote)}`).join(",")}}`;
}

/** JSON in the canonical form of contexts: UTF-8, escaped where it has to be, which is what `JSON.stringify` does. */
export const contextual = (value) => write(value, JSON.stringify);

/** JSON in the canonical form of documents: ASCII only. */
export const canonical = (value) => write(value, (string) => JSON.stringify(string).replace(/[\u007f-\uffff]/g, escape));

/** The value of a document in canonical form, without a newline. */
export function parseCanonical(bytes) {
  const source = decode(bytes);
  const value = parse(source);
  check(canonical(value) === source, "format", "expected JSON in canonical form");
  return value;
}

/** The value of a document in canonical form and a newline, of limited size. */
export function parseLine(bytes, limit) {
  check(bytes.length <= limit && bytes.at(-1) === 10, "format", `expected ${limit} bytes at most, with a newline at the end`);
  return parseCanonical(bytes.subarray(0, -1));
}

// Forms: functions that return what a value of JSON stands for, or refuse it.

const form = (holds, expected, read = (value) => value) => (value) => {
  check(holds(value), "format", `expected ${expected}`);
  return read(value);
};
export const exactly = (wanted) => form((value) => value === wanted, JSON.stringify(wanted));
export const bool = form((value) => typeof value === "boolean", "true or false");
export const number = (least = 0, end = 2 ** 53) =>
  form((value) => Number.isSafeInteger(value) && value >= least && value < end, `a whole number from ${least}, below ${end}`);
export const matching = (pattern) => form((value) => typeof value === "string" && pattern.test(value), `${pattern}`);
export const string = matching(/^/);
export const id = matching(/^[0-9a-f]{32}$/);
export const digest = matching(/^[0-9a-f]{64}$/);
export const time = form((value) => {
  if (typeof value !== "string" || !/^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z$/.test(value) || value.startsWith("0000")) return false;
  const at = new Date(value);
  return !Number.isNaN(at.getTime()) && at.toISOString() === value.replace("Z", ".000Z"); // there is no 31 February
}, "a time in whole seconds of UTC");
export const hexadecimal = (size) => (value) => unhex(matching(new RegExp(`^[0-9a-f]{${2 * size}}$`))(value));
export const bytes = (least = 1, most = Infinity) => (value) => {
  const data = unbase64(string(value));
  check(data.length >= least && data.length <= most, "format", `expected ${least} to ${most} bytes`);
  return data;
};
export const orNull = (other) => (value) => (value === null ? null : other(value));
export const oneOf = (...words) => form((value) => words.includes(value), `one of ${words}`);
export const array = (item, least = 0, most = Infinity) => (value) => {
  check(Array.isArray(value) && value.length >= least && value.length <= most, "format", `expected an array of ${least} to ${most}`);
  return value.map((each) => item(each));
};
export const tuple = (...forms) => (value) => {
  check(Array.isArray(value) && value.length === forms.length, "format", `expected an array of ${forms.length}`);
  return forms.map((each, at) => each(value[at]));
};
export const map = (value, name, least = 0) => (members) => {
  check(members instanceof Map && members.size >= least, "format", "expected an object");
  return new Map([...members].map(([key, member]) => [name(key), value(member)]));
};
/** An object of exactly these members; those of `optional` may be absent. */
export const object = (forms, optional = {}) => (value) => {
  check(value instanceof Map, "format", "expected an object");
  const all = { ...forms, ...optional };
  for (const name of value.keys()) check(Object.hasOwn(all, name), "format", `unknown member ${JSON.stringify(name)}`);
  for (const name of Object.keys(forms)) check(value.has(name), "format", `expected a member ${name}`);
  return Object.fromEntries([...value].map(([name, member]) => [name, all[name](member)]));
};
/** An object of these members, and perhaps of others, which are ignored. */
export const some = (forms) => (value) => {
  check(value instanceof Map, "format", "expected an object");
  return object(forms)(new Map([...value].filter(([name]) => Object.hasOwn(forms, name))));
};
