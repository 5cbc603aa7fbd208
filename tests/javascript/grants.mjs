// Grants: who may open what, under HPKE (RFC 9180, base mode, single shot) or a passphrase.
import { x25519 } from "@noble/curves/ed25519.js";
import { p384 } from "@noble/curves/nist.js";
import { argon2id } from "@noble/hashes/argon2.js";
import { expand, extract } from "@noble/hashes/hkdf.js";
import { sha384 } from "@noble/hashes/sha2.js";
import { sha3_256, shake256 } from "@noble/hashes/sha3.js";
import { ml_kem768 } from "@noble/post-quantum/ml-kem.js";
import { big, check, concat, Refused, text, utf8 } from "./bytes.mjs";
import * as json from "./json.mjs";
import { keyId } from "./message.mjs";
import { readEnvelope } from "./signed.mjs";

const { subtle } = globalThis.crypto;
const AES_256_GCM = 2;
const NOTHING = new Uint8Array();
const INFO_LIMIT = 65535; // of X-Wing, in whose key schedule lengths have two bytes
const prefixed = (part) => concat(big(part.length, 2), part);

async function openAes(key, iv, ciphertext, additionalData) {
  const aes = await subtle.importKey("raw", key, "AES-GCM", false, ["decrypt"]);
  return new Uint8Array(await subtle.decrypt({ name: "AES-GCM", iv, additionalData }, aes, ciphertext));
}

/** X-Wing, KEM 0x647a: ML-KEM-768 and X25519, combined by SHA3-256. Its key schedule is that of KDFs of one step. */
function xWing({ secret, public: key }, encapsulated, info) {
  const [first, second] = [encapsulated.slice(0, 1088), encapsulated.slice(1088)];
  const shared = ml_kem768.decapsulate(first, ml_kem768.keygen(secret.slice(0, 64)).secretKey);
  const agreed = x25519.getSharedSecret(secret.slice(64), second);
  const mixed = sha3_256(concat(shared, agreed, second, key.slice(1184), "\\.//^\\"));
  const suite = concat("HPKE", big(0x647a, 2), big(0x0011, 2), big(AES_256_GCM, 2));
  const length = 32 + 12 + 64;
  const secrets = concat(prefixed(NOTHING), prefixed(mixed), "HPKE-v1", suite, prefixed(utf8("secret")), big(length, 2));
  const derived = shake256(concat(secrets, 0, prefixed(NOTHING), prefixed(info)), { dkLen: length });
  return [derived.slice(0, 32), derived.slice(32, 44)];
}

/** DHKEM(P-384, HKDF-SHA384), KEM 0x0011, with the key schedule of RFC 9180, section 5.1. */
function dhP384({ secret, public: key }, encapsulated, info) {
  const labelled = (suite) => ({
    extract: (salt, label, material) => extract(sha384, concat("HPKE-v1", suite, label, material), salt),
    expand: (prk, label, about, size) => expand(sha384, prk, concat(big(size, 2), "HPKE-v1", suite, label, about), size),
  });
  const kem = labelled(concat("KEM", big(0x0011, 2)));
  const agreed = p384.getSharedSecret(secret, encapsulated, false).slice(1, 49);
  const shared = kem.expand(kem.extract(NOTHING, "eae_prk", agreed), "shared_secret", concat(encapsulated, key), 48);
  const hpke = labelled(concat("HPKE", big(0x0011, 2), big(0x0002, 2), big(AES_256_GCM, 2)));
  const about = concat(0, hpke.extract(NOTHING, "psk_id_hash", NOTHING), hpke.extract(NOTHING, "info_hash", info));
  const prk = hpke.extract(shared, "secret", NOTHING);
  return [hpke.expand(prk, "key", about, 32), hpke.expand(prk, "base_nonce", about, 12)];
}

const KEMS = { MLKEM768_X25519: [1120, xWing], "P-384": [97, dhP384] };

async function openEntry(entry, info, { secret, passphrase }) {
  if (entry.algorithm === "Argon2id") {
    const options = { t: entry.iterations, m: entry.memory, p: entry.lanes, dkLen: 32, maxmem: 2 ** 31 };
    const key = argon2id(utf8(passphrase), entry.salt, options);
    return openAes(key, new Uint8Array(12), entry.ciphertext, info);
  }
  const [size, decapsulate] = KEMS[entry.algorithm];
  const [key, nonce] = decapsulate(secret, entry.ciphertext.slice(0, size), info);
  return openAes(key, nonce, entry.ciphertext.slice(size), NOTHING);
}

const NO_ID = "0".repeat(32); // that of an entry for a passphrase
const pair = json.object({ algorithm: json.string, id: json.matching(/^(?!0{32})[0-9a-f]{32}$/), name: json.string, ciphertext: json.bytes(0) });
const argon = json.object({
  algorithm: json.exactly("Argon2id"), id: json.exactly(NO_ID), name: json.string, ciphertext: json.bytes(0), salt: json.bytes(16, 16),
  iterations: json.number(3, 17), lanes: json.number(1, 17), memory: json.number(65536, 1048577),
});
/** An entry for a recipient. One of an algorithm that is not known is for others, whatever members it has. */
function recipientOf(entry) {
  const algorithm = entry instanceof Map ? json.string(entry.get("algorithm")) : undefined;
  if (algorithm === "Argon2id") return argon(entry);
  if (algorithm === undefined || Object.hasOwn(KEMS, algorithm)) return pair(entry);
  return pair(new Map([...entry].filter(([name]) => ["algorithm", "id", "name", "ciphertext"].includes(name))));
}
const CONSTRAINTS = ["bits", "expires", "files", "key", "least_version", "lineage", "version"];
const PAYLOAD = json.object({
  version: json.exactly(1), key: json.id, bits: json.oneOf(128, 256), files: json.orNull(json.array(json.id)), lineage: json.orNull(json.id),
  least_version: json.number(), expires: json.orNull(json.time), issued: json.time, serial: json.number(),
  recipients: json.array(recipientOf, 1, 4096),
});

/** The grant of a file for a recipient: a key pair in `secret`, or a `passphrase`. */
export async function openGrants(bytes, owners, recipient, time) {
  const { payload } = readEnvelope(json.parse(text(bytes)), "application/vnd.fastrack.grants.v1+json", owners);
  const grant = PAYLOAD(json.parseCanonical(payload));
  check(new Set(grant.recipients.map((entry) => entry.id)).size === grant.recipients.length, "format", "a recipient twice");
  check(grant.expires === null || time < grant.expires, "grant", `it ended at ${grant.expires}`);
  const id = recipient.secret ? recipient.secret.id : NO_ID;
  const entry = grant.recipients.find((each) => each.id === id);
  check(entry && (!recipient.secret || entry.algorithm === recipient.secret.algorithm), "grant", "it is for other recipients");
  const info = concat("fastrack/grant@1", 0, json.canonical(Object.fromEntries(CONSTRAINTS.map((name) => [name, grant[name]]))));
  const short = info.length <= INFO_LIMIT || grant.recipients.every((each) => each.algorithm !== "MLKEM768_X25519");
  check(short, "format", `expected constraints of ${INFO_LIMIT} bytes at most`);
  let key;
  try {
    key = await openEntry(entry, info, recipient);
  } catch {
    throw new Refused("grant", "the entry does not open under these constraints");
  }
  check(8 * key.length === grant.bits && (await keyId(key)) === grant.key, "grant", "it opens to another key");
  const { files, lineage, least_version, expires } = grant;
  return { key, files, lineage, least_version, expires };
}
