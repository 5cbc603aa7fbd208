// Files of keys, of key pairs, and of wrapped keys.
import { ed25519, x25519 } from "@noble/curves/ed25519.js";
import { p384 } from "@noble/curves/nist.js";
import { ml_dsa65 } from "@noble/post-quantum/ml-dsa.js";
import { ml_kem768 } from "@noble/post-quantum/ml-kem.js";
import { base64, check, concat, Refused, sha256, text, unbase64, unhex, utf8 } from "./bytes.mjs";
import * as json from "./json.mjs";
import { keyId } from "./message.mjs";

const { subtle } = globalThis.crypto;

/** The algorithms of key pairs: the sizes of both keys, and the public key of a secret one. */
const PAIRS = {
  Ed25519: { secret: 32, public: 32, derive: (secret) => ed25519.getPublicKey(secret) },
  "ML-DSA-65": { secret: 32, public: 1952, derive: (seed) => ml_dsa65.keygen(seed).publicKey },
  MLKEM768_X25519: {
    secret: 96,
    public: 1216,
    derive: (secret) => concat(ml_kem768.keygen(secret.slice(0, 64)).publicKey, x25519.getPublicKey(secret.slice(64))),
  },
  "P-384": { secret: 48, public: 97, derive: (scalar) => p384.getPublicKey(scalar, false) },
};

/** The groups of a pattern that a whole file has to match; its last newline may be missing. */
function matchFile(bytes, pattern) {
  const found = pattern.exec(text(bytes).replace(/\n$/, ""));
  check(found, "format", `expected ${pattern}`);
  return found.slice(1);
}

/** A key file: the key and its id. */
export async function readKeyFile(bytes) {
  const pattern = /^# fastrack key, (128|256) bits, id ([0-9a-f]{32})\nfastrack-key-1:((?:[0-9a-f]{32}){1,2})$/;
  const [bits, id, digits] = matchFile(bytes, pattern);
  const key = unhex(digits);
  check(8 * key.length === Number(bits) && (await keyId(key)) === id, "format", "the key file was damaged");
  check(key.some((byte) => byte), "format", "a key of zeros, which a wiped one leaves");
  return { key, id };
}

/** The id of a key pair. */
export const pairId = async (algorithm, key) =>
  (await sha256(concat("fastrack/public-key-id@1", 0, algorithm, 0, key))).slice(0, 32);

/** A secret file: algorithm, id, secret and public key. */
export async function readSecretFile(bytes) {
  const pattern = /^# fastrack secret key, ([A-Za-z0-9_-]+), id ([0-9a-f]{32})\nfastrack-secret-1:([A-Za-z0-9_-]+):([0-9a-f]+)$/;
  const [told, id, algorithm, digits] = matchFile(bytes, pattern);
  check(told === algorithm && Object.hasOwn(PAIRS, algorithm), "format", `unknown algorithm ${algorithm}`);
  const secret = unhex(digits);
  check(secret.length === PAIRS[algorithm].secret, "format", "a secret key of another size");
  let key;
  try {
    key = PAIRS[algorithm].derive(secret);
  } catch {
    throw new Refused("format", "no secret key of its algorithm"); // such as 0 for P-384
  }
  check((await pairId(algorithm, key)) === id, "format", "the secret file was damaged");
  return { algorithm, id, secret, public: key };
}

/** The check of FIPS 203, 7.2, which is a part of encapsulation: coefficients are below 3329. */
function checkModulus(key) {
  try {
    ml_kem768.encapsulate(key);
  } catch {
    throw new Refused("format", "no key of ML-KEM-768");
  }
}

/** A public file: algorithm, id, public key and name. */
export async function readPublicFile(bytes) {
  const pattern = /^fastrack-public-1:([A-Za-z0-9_-]+):([A-Za-z0-9+/=]+)(?: ([!-~](?:[ -~]{0,62}[!-~])?))?$/;
  const [algorithm, letters, name = ""] = matchFile(bytes, pattern);
  check(Object.hasOwn(PAIRS, algorithm), "format", `unknown algorithm ${algorithm}`);
  const key = unbase64(letters);
  check(key.length === PAIRS[algorithm].public, "format", "a public key of another size");
  if (algorithm === "P-384") check(key[0] === 4 && p384.utils.isValidPublicKey(key, false), "format", "no point of P-384");
  if (algorithm === "MLKEM768_X25519") checkModulus(key.subarray(0, 1184));
  return { algorithm, id: await pairId(algorithm, key), public: key, name, line: `fastrack-public-1:${algorithm}:${base64(key)}` };
}

/** A public key that signs, by its line in a document: without a newline and a name. */
export async function readSigner(line) {
  const signer = await readPublicFile(utf8(line));
  check(signer.line === line && ["Ed25519", "ML-DSA-65"].includes(signer.algorithm), "format", "expected a public key that signs");
  return signer;
}

const printable = json.matching(/^[ -~]{1,2048}$/);
const rsa = (hash) => async (wrapping, ciphertext) => {
  const key = await subtle.importKey("pkcs8", wrapping, { name: "RSA-OAEP", hash }, false, ["decrypt"]);
  return subtle.decrypt({ name: "RSA-OAEP" }, key, ciphertext);
};
async function aesKeyWrap(wrapping, ciphertext) {
  const key = await subtle.importKey("raw", wrapping, "AES-KW", false, ["unwrapKey"]);
  const kind = { name: "HMAC", hash: "SHA-256" }; // a name for any bytes, which leave Web Crypto at once
  return subtle.exportKey("raw", await subtle.unwrapKey("raw", ciphertext, key, "AES-KW", kind, true, ["sign"]));
}
const uri = { uri: json.matching(/^pkcs11:[!->@-~]{0,2041}$/) }; // no "?", behind which a query would be
const keyed = { key: printable };
/** By provider and algorithm: the parameters, those that may be absent, and what unwraps where no service is needed. */
const WRAPPED = {
  "pkcs11 RSA-OAEP-SHA256": [uri, {}, rsa("SHA-256")],
  "pkcs11 RSA-OAEP-SHA1": [uri, {}, rsa("SHA-1")],
  "pkcs11 AES-KW": [uri, {}, aesKeyWrap],
  "tpm TPM2-SEALED": [{ parent: json.matching(/^(?:[0-9a-f]{2}){1,1024}$/) }, { pcrs: printable }],
  "vault-transit transit": [{ mount: printable, name: printable }, {}],
  "aws-kms SYMMETRIC_DEFAULT": [keyed, {}],
  "gcp-kms GOOGLE_SYMMETRIC_ENCRYPTION": [keyed, {}],
  "azure-keyvault RSA-OAEP-SHA256": [keyed, {}, rsa("SHA-256")],
};

/** A wrapped key file, whose key is unwrapped by `wrapping`, or was decrypted elsewhere. */
export async function readWrapped(bytes, { wrapping, decrypted }) {
  const wrapped = json.object({
    version: json.exactly(1), key: json.id, bits: json.oneOf(128, 256), provider: json.string, parameters: json.map(printable, json.string),
    algorithm: json.matching(/^[A-Za-z0-9_-]+$/), ciphertext: json.bytes(1, 8192),
  })(json.parseLine(bytes, 65536));
  const known = WRAPPED[`${wrapped.provider} ${wrapped.algorithm}`];
  check(known, "format", `unknown provider or algorithm: ${wrapped.provider}, ${wrapped.algorithm}`);
  const [required, optional, unwrap] = known;
  json.object(required, optional)(wrapped.parameters);
  let key = decrypted;
  if (wrapping) {
    check(unwrap, "format", `nothing but ${wrapped.provider} itself decrypts this`);
    try {
      key = new Uint8Array(await unwrap(wrapping, wrapped.ciphertext));
    } catch {
      throw new Refused("authentication", "the wrapped key was altered, or wrapped by another");
    }
  }
  const right = 8 * key.length === wrapped.bits && (await keyId(key)) === wrapped.key;
  check(right, "unknown-key", "it opens to another key");
  return { key, id: wrapped.key, provider: wrapped.provider, algorithm: wrapped.algorithm };
}
