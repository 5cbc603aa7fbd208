// The message: C2SP chunked encryption, with Web Crypto alone. Runs in browsers too.
import { big, check, concat, hex, Refused, same } from "./bytes.mjs";

export const [SALT, HEADER, CHUNK, TAG] = [24, 56, 16384, 16];
const NONCE = 12;
const { subtle } = globalThis.crypto;

/** HMAC of a hash function of Web Crypto. */
export async function hmac(hash, key, data) {
  const imported = await subtle.importKey("raw", key, { name: "HMAC", hash }, false, ["sign"]);
  return new Uint8Array(await subtle.sign("HMAC", imported, data));
}

/** HKDF-Expand (RFC 5869). Web Crypto's HKDF extracts first, which a message does not. */
export async function expand(hash, key, info, length) {
  let [block, all] = [new Uint8Array(), new Uint8Array()];
  for (let count = 1; all.length < length; count++) {
    block = await hmac(hash, key, concat(block, info, count));
    all = concat(all, block);
  }
  return all.subarray(0, length);
}

/** The id of a key of 16 or 32 bytes, in hexadecimal. */
export const keyId = async (key) => hex(await expand("SHA-512", key, concat("fastrack/key-id@1", 0, key.length), 16));

/** The key, base nonce and commitment of a message, from the owner's key, a salt and a context. */
export async function derive(key, salt, context) {
  const suite = { 16: "AEAD_AES_128_GCM", 32: "AEAD_AES_256_GCM" }[key.length];
  check(suite, "format", `expected a key of 16 or 32 bytes, got ${key.length}`);
  const info = concat("c2sp.org/chunked-encryption@v1+", suite, 0, salt, context);
  const all = await expand("SHA-512", key, info, key.length + NONCE + 32);
  const end = key.length + NONCE;
  return { key: all.subarray(0, key.length), nonce: all.subarray(key.length, end), commitment: all.subarray(end) };
}

/** The bytes of a message of so many bytes of plaintext. */
export const messageSize = (plain) => HEADER + plain + TAG * chunkCount(plain);
/** The last chunk is shorter than the others, if only a tag: so a message cut between chunks has no end. */
export const chunkCount = (plain) => Math.floor(plain / CHUNK) + 1;

/** The secrets of a message whose commitment is right. Nothing of it is opened before. */
export async function unlock(message, key, context) {
  const secrets = await derive(key, message.subarray(0, SALT), context);
  const right = same(secrets.commitment, message.subarray(SALT, HEADER));
  check(right, "authentication", "the commitment is another: the key or the context is, or the header was altered");
  const aes = await subtle.importKey("raw", secrets.key, "AES-GCM", false, ["decrypt"]);
  secrets.key.fill(0);
  return { aes, nonce: secrets.nonce };
}

/** The plaintext of one chunk. Web Crypto hands out none whose tag is wrong. */
export async function openChunk({ aes, nonce }, message, index) {
  const start = HEADER + index * (CHUNK + TAG);
  const iv = nonce.slice();
  big(index, 5).forEach((byte, at) => (iv[NONCE - 5 + at] ^= byte)); // in the last 38 bits: an index has no more
  try {
    return new Uint8Array(await subtle.decrypt({ name: "AES-GCM", iv }, aes, message.subarray(start, start + CHUNK + TAG)));
  } catch {
    throw new Refused("authentication", `chunk ${index} was altered`);
  }
}

/** The plaintext of a message, of a size that is known from elsewhere. All of it, or a refusal. */
export async function openMessage(message, key, context, size) {
  check(message.length === messageSize(size), "format", `expected a message of ${messageSize(size)} bytes, got ${message.length}`);
  const secrets = await unlock(message, key, context); // before memory is allocated for the claimed size
  const plain = new Uint8Array(size);
  try {
    for (let index = 0; index < chunkCount(size); index++) plain.set(await openChunk(secrets, message, index), index * CHUNK);
  } catch (error) {
    plain.fill(0); // chunks before the bad one are not handed out either
    throw error;
  }
  return plain;
}
