// What is one message or MAC: messages between ranks, and blocks of KV caches.
import { big, check, concat, hex, same, utf8 } from "./bytes.mjs";
import * as json from "./json.mjs";
import { derive, expand, hmac, openMessage, SALT } from "./message.mjs";

const sized = (text) => concat(big(utf8(text).length), text);

async function secretsOf({ key, within, run, name, members, random }) {
  const pseudorandom = await hmac("SHA-512", new Uint8Array(64), concat(key, within)); // HKDF-Extract without a salt: as many zeros as a hash has
  const info = concat("fastrack/group@3", 0, sized(run), sized(name), big(members.length), ...members.map((member) => big(member)), ...random);
  const all = await expand("SHA-512", pseudorandom, info, key.length + 64);
  return { message: all.subarray(0, key.length), mac: all.subarray(key.length, key.length + 32) };
}

/** The tensor of a message between ranks. */
export async function openRanks(bytes, { operation, dtype, number, source, target, size, ...session }) {
  const secrets = await secretsOf(session);
  const numbers = [number, source, target, size].map((value) => big(value));
  return openMessage(bytes, secrets.message, concat("fastrack/group@3", 0, 0, operation, 0, dtype, 0, ...numbers), size);
}

/** Refuse a MAC of another text, rank or session than expected. */
export async function confirm(bytes, { text, rank, ...session }) {
  const { mac } = await secretsOf(session);
  check(same(await hmac("SHA-256", mac, concat(text, big(rank))), bytes), "authentication", "the MAC is another");
}

const BLOCK = json.object({
  hash: json.matching(/^(?:[0-9a-f]{2})*$/), layout: json.string, model: json.string, ranks: json.string, salt: json.string,
});

/** A sealed KV block: its name in a store, and its bytes. */
export async function openBlock(bytes, key, context, size) {
  BLOCK(json.parseCanonical(utf8(context)));
  const { commitment } = await derive(key, new Uint8Array(SALT), concat("fastrack/kv-name@1", 0, context));
  return { name: hex(commitment), data: await openMessage(bytes, key, concat("fastrack/kv@1", 0, context), size) };
}
