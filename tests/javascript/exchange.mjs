// Challenges, offers and answers: grants for machines.
import { big, check, concat, hash, hex, sha256 } from "./bytes.mjs";
import { openGrants } from "./grants.mjs";
import * as json from "./json.mjs";

const [KIB, MIB] = [1024, 1024 ** 2];
const document = (kind, members) => json.object({ kind: json.exactly(`fastrack/${kind}`), version: json.exactly(1), ...members });

const CHALLENGE = document("challenge", { id: json.id, nonce: json.bytes(32, 32), expires: json.time });

/** A challenge. */
export const readChallenge = (bytes) => CHALLENGE(json.parseLine(bytes, KIB));

const COLLATERAL = ["tcb_info", "tcb_info_signature", "tcb_info_issuer_chain", "qe_identity", "qe_identity_signature",
  "qe_identity_issuer_chain", "root_ca_crl", "pck_crl", "pck_crl_issuer_chain"];
const certificates = json.orNull(json.bytes(1, 65536));
const CPUS = {
  tdx: json.object({
    type: json.string, quote: json.bytes(1, 65536),
    collateral: json.orNull(json.object(Object.fromEntries(COLLATERAL.map((name) => [name, json.bytes(1, MIB)])))),
  }, { event_log: json.bytes(1, 4 * MIB) }),
  snp: json.object({
    type: json.string, report: json.bytes(1, 16384), leaf: certificates, issuers: certificates, crl: json.orNull(json.bytes(1, MIB)),
  }),
};
const ocsp = json.orNull(json.array(json.bytes(1, 16384), 0, 16));
const OFFER = document("offer", {
  challenge: json.id, public: json.bytes(1216, 1216),
  cpu: (cpu) => {
    const type = cpu instanceof Map && cpu.get("type");
    check(typeof type === "string" && Object.hasOwn(CPUS, type), "format", "expected a known type of CPU");
    return CPUS[type](cpu);
  },
  devices: json.array(json.object({
    report: json.bytes(1, 16384), chain: json.bytes(1, 65536), ocsp, manifests: json.array(json.number(0, 64)),
  }), 0, 32),
  manifests: json.array(json.object({ data: json.bytes(1, MIB), ocsp }), 0, 64),
});

/** Parts, each behind its length. A hash is over a label, as it is, and such a list. */
const list = (...parts) => concat(...parts.flatMap((part) => [big(concat(part).length, 4), part]));
const listOcsp = (responses) => (responses === null ? new Uint8Array() : list(list(...responses)));

function checkManifests({ devices, manifests }) {
  const first = new Set();
  for (const device of devices) {
    check(new Set(device.manifests).size === device.manifests.length, "format", "a manifest twice");
    device.manifests.forEach((place) => first.add(place)); // a set keeps the order in which places came first
  }
  check([...first].every((place, at) => place === at) && first.size === manifests.length, "format", "manifests in another order");
  const different = new Set(manifests.map((manifest) => hex(list(manifest.data, listOcsp(manifest.ocsp)))));
  check(different.size === manifests.length, "format", "expected different manifests");
}

/** An offer that answers a challenge in time, and what its evidence has to be bound to. Evidence itself is not verified. */
export async function readOffer(bytes, challenge, time) {
  const { id, expires } = readChallenge(challenge);
  const offer = OFFER(json.parseLine(bytes, 8 * MIB));
  checkManifests(offer);
  check(offer.challenge === id, "attestation", "it answers another challenge");
  check(time < expires, "attestation", `the challenge ended at ${expires}`);
  const listed = offer.manifests.map((manifest) => list(manifest.data, listOcsp(manifest.ocsp)));
  const nonces = [];
  const devices = [];
  for (const [index, { report, chain, ocsp: responses, manifests }] of offer.devices.entries()) {
    nonces.push(hex(await hash(concat("fastrack/gpu@1", list(challenge, offer.public, big(index, 4))))));
    devices.push(list(report, chain, listOcsp(responses), list(...manifests.map((place) => listed[place]))));
  }
  const bound = await hash(concat("fastrack/gpus@1", list(...devices)), "SHA-384");
  const report = await hash(concat("fastrack/offer@1", list(challenge, offer.public, bound)), "SHA-512");
  return { public: await sha256(offer.public), cpu: offer.cpu.type, nonces, report_data: hex(report) };
}

const ANSWER = document("grants", { challenge: json.id, grants: json.array(json.bytes(1, 64 * KIB), 1, 1024) });

/** The keys of an answer to an offer of this challenge. */
export async function readAnswer(bytes, challenge, owners, secret, time) {
  const answer = ANSWER(json.parseLine(bytes, 4 * MIB));
  check(answer.challenge === challenge, "attestation", "it answers another challenge");
  const keys = [];
  for (const grants of answer.grants) keys.push((await openGrants(grants, owners, { secret }, time)).key);
  return keys;
}
