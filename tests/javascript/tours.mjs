// The chain of a tour: plan, receipts and completion.
import { check, sha256, unbase64 } from "./bytes.mjs";
import * as json from "./json.mjs";
import { readSigner } from "./keys.mjs";
import { readSignedLine } from "./signed.mjs";

const [LIMIT, LINE] = [64 * 2 ** 20, 2 ** 20];
const model = json.tuple(json.number(1), json.digest);
const files = json.array(json.id, 0, 4096);
const envelope = json.bytes(1, LINE);
const key = json.string; // the line of a public file, read where it is used
const FORMS = {
  plan: {
    tour: json.id, lineage: json.id, start: model, holders: json.map(key, json.matching(/^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/), 1),
    order: json.array(json.string, 1, 10_000), seconds: json.number(1, 2 ** 31), attempts: json.number(1, 2 ** 16), code: json.digest,
    issued: json.time, expires: json.time,
  },
  delegation: {
    plan: json.digest, visit: json.number(), attempt: json.number(1), previous: json.digest, before: model, signer: key, key: json.id,
    salt: json.digest, expires: json.time,
  },
  consent: { delegation: json.digest, policy: json.digest, offer: json.digest, files, issued: json.time, expires: json.time },
  receipt: {
    delegation: envelope, consent: envelope, code: json.digest, after: json.orNull(model), files, chunks: json.number(), scrubbed: json.number(),
    started: json.time, ended: json.time,
  },
  completion: { plan: json.digest, head: json.digest, visits: json.number(), model, issued: json.time },
};

/** A document of a kind, signed by a key: its members, and its digest. */
async function readSigned(bytes, kind, signer) {
  const payload = readSignedLine(bytes, LINE, `application/vnd.fastrack.tour.${kind}.v1+json`, signer);
  const members = json.object({ format: json.exactly(1), ...FORMS[kind] })(json.parseCanonical(payload));
  return { ...members, digest: await sha256(payload) };
}

async function readPlan(bytes, owner) {
  const plan = await readSigned(bytes, "plan", owner);
  check(plan.holders.size <= 1024 && new Set(plan.holders.values()).size === plan.holders.size, "format", "a key of two holders");
  const visited = new Set(plan.order);
  check(visited.size === plan.holders.size && plan.order.every((name) => plan.holders.has(name)), "format", "an order of others");
  check(plan.issued < plan.expires, "format", "a plan that ends before it begins");
  const holders = new Map();
  for (const [name, line] of plan.holders) holders.set(name, await readSigner(line));
  return { ...plan, holders };
}

const alike = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** A receipt of the next visit of a chain, which `chain` is the beginning of. */
async function readReceipt(bytes, owner, { plan, visits, head, model: before }) {
  const expected = (holds, what) => check(holds, "rollback", `visit ${visits}: expected ${what}`);
  // Who signed a receipt stands in the delegation inside it, so that is looked at before, and verified first of all.
  const inside = json.object({ payload: json.bytes(), payloadType: json.string, signatures: (value) => value })(json.parseLine(bytes, LINE));
  const claimed = json.parseCanonical(inside.payload);
  check(claimed instanceof Map && typeof claimed.get("delegation") === "string", "format", "expected a receipt");
  const delegation = await readSigned(unbase64(claimed.get("delegation")), "delegation", owner);
  const receipt = await readSigned(bytes, "receipt", await readSigner(delegation.signer));
  check(receipt.started <= receipt.ended, "format", "a visit that ends before it begins");
  expected(delegation.plan === plan.digest && delegation.visit === visits && delegation.previous === head, "its place in the chain");
  expected(alike(delegation.before, before), "the model before");
  expected(visits < plan.order.length, "no visit after the last one of the plan");
  const consent = await readSigned(receipt.consent, "consent", plan.holders.get(plan.order[visits]));
  expected(consent.delegation === delegation.digest, "a consent to this delegation");
  expected(delegation.attempt <= plan.attempts && delegation.expires <= plan.expires, "an attempt that the plan allows");
  expected(receipt.code === plan.code, "the code of the plan");
  expected(receipt.after !== null && receipt.after[0] === before[0] + 1, "the next version of the model");
  expected(receipt.files.every((file) => consent.files.includes(file)), "only files of the consent");
  const end = delegation.expires < consent.expires ? delegation.expires : consent.expires;
  expected(receipt.ended <= end, "an end in time");
  return { plan, visits: visits + 1, head: receipt.digest, model: receipt.after };
}

/** Verify a chain, whose owner's public key is known: visits, head, model, and whether the tour is over. */
export async function readChain(bytes, owner) {
  check(bytes.length <= LIMIT && bytes.at(-1) === 10, "format", "expected lines");
  const lines = [];
  for (let start = 0; start < bytes.length; start = lines.at(-1).end) {
    const end = bytes.indexOf(10, start) + 1;
    lines.push({ end, bytes: bytes.subarray(start, end) });
  }
  const plan = await readPlan(lines[0].bytes, owner);
  let chain = { plan, visits: 0, head: plan.digest, model: plan.start };
  for (const [at, line] of lines.slice(1).entries()) {
    const type = json.parseLine(line.bytes, LINE);
    if (!(type instanceof Map) || type.get("payloadType") !== "application/vnd.fastrack.tour.completion.v1+json") {
      chain = await readReceipt(line.bytes, owner, chain);
      continue;
    }
    const { plan: of, head, visits, model: made } = await readSigned(line.bytes, "completion", owner);
    check(at === lines.length - 2, "format", "a line behind the completion");
    check(visits === plan.order.length, "rollback", "a completion before the last visit");
    const right = alike([of, head, visits, made], [plan.digest, chain.head, chain.visits, chain.model]);
    check(right, "rollback", "a completion of another chain");
    return { ...chain, complete: true };
  }
  return { ...chain, complete: false };
}
