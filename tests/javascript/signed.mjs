// Signed documents: DSSE envelopes.
import { ed25519 } from "@noble/curves/ed25519.js";
import { ml_dsa65 } from "@noble/post-quantum/ml-dsa.js";
import { check, concat } from "./bytes.mjs";
import * as json from "./json.mjs";

// Not `zip215`, noble's default, which takes signatures that RFC 8032 refuses.
const VERIFY = {
  Ed25519: (signature, message, key) => ed25519.verify(signature, message, key, { zip215: false }),
  "ML-DSA-65": (signature, message, key) => ml_dsa65.verify(signature, message, key),
};

function holds(signature, message, owner) {
  try {
    return VERIFY[owner.algorithm](signature, message, owner.public);
  } catch {
    return false; // of a wrong size, or a key that is no signer's
  }
}

const LINE = json.object({
  payload: json.bytes(0), payloadType: json.string, signatures: json.array(json.object({ sig: json.bytes(0), keyid: json.string })),
});
/** Of grants, whose members that DSSE does not name are ignored, and so is the hint of the signer. */
const ENVELOPE = json.some({ payload: json.bytes(0), payloadType: json.string, signatures: json.array(json.some({ sig: json.bytes(0) })) });

/** The payload of an envelope of this type, which one of these owners signed, and its signature that holds. */
export function readEnvelope(envelope, type, owners, form = ENVELOPE) {
  const { payload, payloadType, signatures } = form(envelope);
  check(payloadType === type, "format", `expected ${type}`);
  const message = concat(`DSSEv1 ${type.length} ${type} ${payload.length} `, payload);
  for (const owner of owners)
    for (const signature of signatures) if (holds(signature.sig, message, owner)) return { payload, owner, signatures, signature };
  check(false, "signature", "no trusted key signed it as it is");
}

/** The payload of a line in the one form of manifests and tours: canonical, one signature, with the id of its signer. */
export function readSignedLine(bytes, limit, type, owner) {
  const { payload, signatures, signature } = readEnvelope(json.parseLine(bytes, limit), type, [owner], LINE);
  check(signatures.length === 1 && signature.keyid === owner.id, "format", "expected one signature, with the id of its signer");
  return payload;
}
