// Serves Perfetto's trace processor, compiled to WebAssembly, over HTTP: what the Python package `perfetto` asks of an
// address. The one argument is the folder that holds engine_bundle.js and the .wasm files; the port goes to stdout.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { setFlagsFromString } from "node:v8";
import { createContext, runInContext } from "node:vm";

// protos/perfetto/trace_processor/trace_processor.proto, TraceProcessorRpc: the method, and the fields of its
// arguments and of its result.
const ENDPOINTS = {
  "/parse": { method: 1, argument: 101, result: 201 },
  "/notify_eof": { method: 2, result: 212 },
  "/query": { method: 3, argument: 103, result: 203 },
  "/status": { method: 10, result: 210 },
};
const REQUEST = 2;
const FATAL_ERROR = 5;
const VARINT = 0;
const BYTES = 2;

setFlagsFromString("--liftoff-only"); // to optimise what runs for a second takes longer than it saves
main(process.argv[2]);

async function main(folder) {
  const ask = loadEngine(folder);
  await new Promise(setImmediate); // the engine takes requests once its pending promises have run
  const server = createServer(async (request, response) => {
    const endpoint = ENDPOINTS[request.url];
    const body = Buffer.concat(await request.toArray());
    if (!endpoint) response.writeHead(404);
    response.end(endpoint && call(ask, endpoint, body));
  });
  server.listen(0, "127.0.0.1", () => console.log(server.address().port));
  process.stdin.resume().on("end", () => process.exit()); // whoever started this is gone
}

// The bundle is a web worker: it fetches its .wasm, and is handed a message port. Here both are plain functions, and
// all answers have come when the call returns.
function loadEngine(folder) {
  let replies = [];
  const port = { postMessage: (reply) => replies.push(Buffer.from(reply)) };
  const worker = { location: { href: "" } };
  const log = (...words) => console.error(...words);
  const context = createContext({
    self: worker,
    WorkerGlobalScope: Object,
    XMLHttpRequest: fileReader(folder),
    Uint8Array,
    TextDecoder,
    URL,
    performance,
    console: { log, warn: log, error: log },
  });
  runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), context);
  worker.onmessage({ data: port });
  return (request) => {
    replies = [];
    port.onmessage({ data: new Uint8Array(request) });
    return Buffer.concat(replies);
  };
}

function fileReader(folder) {
  return class {
    open(method, name) {
      this.name = name;
    }
    send() {
      this.response = readFileSync(join(folder, this.name));
    }
  };
}

// A result that comes in batches has one message for each: end to end, they are the encoding of the whole.
function call(ask, { method, argument, result }, body) {
  const parts = [varint(key(REQUEST, VARINT)), varint(method)];
  if (argument) parts.push(field(argument, body));
  const replies = ask(field(1, Buffer.concat(parts)));
  const results = [];
  for (const [, message] of fieldsOf(replies)) {
    for (const [number, value] of fieldsOf(message)) {
      if (number === FATAL_ERROR) throw new Error(value.toString());
      if (number === result) results.push(value);
    }
  }
  if (!results.length) throw new Error(`the trace processor gave no answer to method ${method}`);
  return Buffer.concat(results);
}

function field(number, value) {
  return Buffer.concat([varint(key(number, BYTES)), varint(value.length), value]);
}

function key(number, type) {
  return (number << 3) | type;
}

function varint(value) {
  const bytes = [];
  for (; value > 127; value >>>= 7) bytes.push((value & 127) | 128);
  return Buffer.from([...bytes, value]);
}

function* fieldsOf(message) {
  let place = 0;
  const next = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = message[place++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return Number(value);
    }
  };
  while (place < message.length) {
    const tag = next();
    if ((tag & 7) === VARINT) yield [tag >>> 3, next()];
    else if ((tag & 7) === BYTES) {
      const end = next() + place;
      yield [tag >>> 3, message.subarray(place, end)];
      place = end;
    } else throw new Error(`wire type ${tag & 7} in an answer of the trace processor`);
  }
}
