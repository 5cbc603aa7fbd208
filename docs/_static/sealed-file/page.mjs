// The page that takes a sealed file apart. Names and texts of files are hostile: they are set as text, never as HTML.
import { hex, Refused, text, unbase64, unhex } from "./bytes.mjs";
import { FILE, KEY } from "./example.mjs";
import { CHUNK, chunkCount, HEADER, SALT, TAG } from "./message.mjs";
import { byteSize, keyOf, openTensor, readSafetensors, readSealed } from "./sealed.mjs";

const LIMIT = 256 * 2 ** 20; // a tab holds the file, a copy of one message, and its plaintext
const SHOWN = 12;
const $ = (id) => document.getElementById(id);
const make = (tag, content = "", kind = "") => Object.assign(document.createElement(tag), { textContent: content, className: kind });
const rows = (list, pairs) => list.replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
const count = (number) => number.toLocaleString("en");

let file; // the bytes, what they say, and the tensor that was chosen
let turn = 0; // what began last is shown: whatever was begun before it ends without a word

function show(bytes) {
  turn++;
  $("message").hidden = $("opening").hidden = $("header").hidden = true;
  try {
    const { metadata, start } = readSafetensors(bytes);
    file = { bytes, start, ...readSealed(bytes) };
    $("size").textContent = `${count(bytes.length)} bytes: a header of JSON in the first ${count(start)}, and then the tensors.`;
    rows($("metadata"), [...metadata]);
  } catch (error) {
    $("size").textContent = `${error.kind ?? "error"}: ${error.message}`;
    $("metadata").replaceChildren();
    file = undefined;
  }
  const tensors = file ? [...file.sealed.values()] : [];
  const plain = file ? [...file.plain].map(([name, { dtype, shape }]) => make("span", `${name}: ${dtype} [${shape}], unencrypted`)) : [];
  $("tensors").replaceChildren(...tensors.map(choice), ...plain);
  $("header").hidden = false;
  if (tensors.length) choose(tensors[0]);
}

function choice(claim) {
  const button = make("button", `${claim.name}: ${claim.dtype} [${claim.shape}]`);
  button.onclick = () => choose(claim);
  claim.button = button;
  return button;
}

function choose(claim) {
  for (const each of file.sealed.values()) each.button.setAttribute("aria-pressed", String(each === claim));
  file.claim = claim;
  file.flipped = undefined;
  const { message } = claim;
  const chunks = chunkCount(byteSize(claim));
  $("name").textContent = claim.name;
  rows($("parts"), [
    ["salt, 24 bytes", hex(message.subarray(0, SALT))],
    ["commitment, 32", hex(message.subarray(SALT, HEADER))],
    ["chunks", `${count(chunks)}, with ${count(byteSize(claim))} bytes of plaintext in all`],
    ["context", text(claim.context).replace("\0", "\\0")],
  ]);
  const last = chunks - 1;
  const places = [["the salt", 0], ["the commitment", SALT], ["chunk 0", HEADER], [`the tag of chunk ${last}`, message.length - 1]];
  $("where").replaceChildren(...places.map(([name, at]) => Object.assign(make("option", name), { value: at })));
  $("where").value = HEADER; // of chunk 0, or of its tag if it has nothing else
  $("message").hidden = false;
  open();
}

/** The parts of a message, their lengths to scale; of a long one the first chunks. */
function drawBar(claim, kinds) {
  const size = byteSize(claim);
  const chunks = chunkCount(size);
  const part = (kind, length) => {
    const span = make("span", "", kind);
    span.style.flexGrow = length;
    return span;
  };
  const parts = [part("salt", SALT), part("commitment", HEADER - SALT)];
  for (let index = 0; index < Math.min(chunks, SHOWN); index++)
    parts.push(part(kinds(index), Math.min(CHUNK, size - index * CHUNK)), part("tag", TAG));
  if (chunks > SHOWN) parts.push(part("more", CHUNK));
  $("bar").replaceChildren(...parts);
  $("bar").ariaLabel = `salt, commitment, and ${count(chunks)} chunks${chunks > SHOWN ? `, of which ${SHOWN} are drawn` : ""}`;
}

const readKey = (typed) => unhex(/(?:fastrack-key-1:)?([0-9a-f]{64}|[0-9a-f]{32})\s*$/.exec(typed)?.[1] ?? "");

async function open() {
  const mine = ++turn;
  const current = file; // another may be chosen while this one is opened
  const { claim, flipped } = current;
  const steps = [];
  const tell = (state, verdict, values = "", kinds = () => "cipher") => {
    if (mine !== turn) return;
    $("steps").replaceChildren(...steps.map((step) => make("li", step)));
    $("verdict").textContent = verdict;
    $("verdict").dataset.state = state;
    $("values").textContent = values;
    drawBar(claim, kinds);
  };
  $("opening").hidden = false;
  $("restore").hidden = flipped === undefined;
  tell("waiting", "");
  try {
    const key = readKey($("key").value);
    if (!key.length) return tell("waiting", "Give the key, and the message opens.");
    await keyOf(current, [key]);
    steps.push(`The key has the id ${current.key}, as the file says.`);
    const message = claim.message.slice();
    if (flipped !== undefined) message[flipped] ^= 1;
    const plain = await openTensor(current, { ...claim, message }, key);
    steps.push(
      "HKDF-Expand with SHA-512 makes the message's own key, its nonce and its commitment, from the owner's key, salt and context.",
      "The commitment is the one in the file. Only then is anything opened.",
      `All ${count(chunkCount(plain.length))} tags are right, and the last chunk is the last one.`,
    );
    tell("opened", `Opened: ${count(plain.length)} bytes, all authentic.`, firstValues(claim, plain), () => "plain");
  } catch (error) {
    const bad = Number(/^chunk (\d+)/.exec(error.message)?.[1] ?? NaN);
    const kind = error instanceof Refused ? error.kind : "error";
    const verdict = `Refused (${kind}): ${error.message}. 0 of ${count(byteSize(claim))} bytes came out.`;
    tell("refused", verdict, "", (index) => (index === bad ? "bad" : "cipher"));
  }
}

const NUMBERS = {
  F32: ["getFloat32", 4], F64: ["getFloat64", 8], I8: ["getInt8", 1], U8: ["getUint8", 1], BOOL: ["getUint8", 1], I16: ["getInt16", 2],
  U16: ["getUint16", 2], I32: ["getInt32", 4], U32: ["getUint32", 4], I64: ["getBigInt64", 8], U64: ["getBigUint64", 8],
};

function firstValues({ dtype }, plain) {
  const [read, size] = NUMBERS[dtype] ?? [];
  if (!read) return `the first bytes: ${hex(plain.subarray(0, 64))}`; // no browser has a name for all dtypes
  const view = new DataView(plain.buffer);
  const values = Array.from({ length: Math.min(24, plain.length / size) }, (_, at) => view[read](at * size, true));
  const round = (value) => (dtype[0] === "F" ? Number(value.toPrecision(6)) : value);
  return `${values.map(round).join("  ")}${plain.length > 24 * size ? "  …" : ""}`;
}

async function take(chosen) {
  if (!chosen) return;
  if (chosen.size > LIMIT) $("size").textContent = `expected a file of ${count(LIMIT)} bytes at most`;
  else show(new Uint8Array(await chosen.arrayBuffer()));
  $("header").hidden = false;
}

$("file").onchange = () => take($("file").files[0]);
$("key").oninput = () => file?.claim && open();
$("example").onclick = () => {
  $("key").value = KEY;
  show(unbase64(FILE));
};
$("flip").onclick = () => {
  file.flipped = Number($("where").value);
  open();
};
$("restore").onclick = () => {
  file.flipped = undefined;
  open();
};
for (const [event, over] of [["dragover", true], ["dragleave", false], ["drop", false]])
  document.addEventListener(event, (dropped) => {
    dropped.preventDefault(); // or else the browser would leave for the file
    $("drop").classList.toggle("over", over);
    if (event === "drop") take(dropped.dataTransfer.files[0]);
  });
