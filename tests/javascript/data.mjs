// Shards of datasets.
import { big, check, hash, hex, join, same, utf8 } from "./bytes.mjs";
import * as json from "./json.mjs";
import { byteSize, openFile } from "./sealed.mjs";

const ABOUT = json.object({
  version: json.exactly(1), data_set: json.matching(/./s), shard: json.matching(/./s), previous: json.string, before: json.number(),
  first: json.number(), samples: json.number(), run: json.number(), complete: json.bool, left_out: json.bool,
  types: json.map(json.string, json.string), files: json.array(json.tuple(json.string, json.number())),
});
const MOST = 2 ** 24; // samples that this reader holds: those of no bytes take no room in a file, however many it says there are
const NULL = new Uint8Array(8).fill(255);

function offsetsOf(name, { dtype, shape, data }, records) {
  check(dtype === "I64" && shape.length === 1 && shape[0] > 0, "format", `${name}: expected offsets of I64`);
  const offsets = Array.from(new BigInt64Array(data.slice().buffer), Number);
  const rising = offsets.every((offset, at) => at === 0 || offset >= offsets[at - 1]);
  const all = rising && offsets[0] === 0 && offsets.at(-1) === records.shape[0];
  check(all && records.shape.length === 1, "format", `${name}: expected offsets from 0 to the number of records`);
  return offsets;
}

/** The column of a name: its form, which is the same in all shards, and the bytes of each sample; `null` of a null. */
function readColumn(tensors, name) {
  const [values, records, offsets] = ["", ".records", ".offsets"].map((end) => tensors.get(name + end));
  const stored = values ?? records;
  check(stored && !values !== !offsets && stored.shape.length, "format", `${name}: expected a column`);
  const [size, row] = [byteSize({ ...stored, shape: [8] }) / 8, stored.shape.slice(1)];
  const width = row.reduce((all, extent) => all * Number(extent), size);
  const count = values ? stored.shape[0] : offsets.shape[0] - 1;
  check(count <= MOST, "format", `${name}: more samples than this reader holds`);
  const places = values ? Array.from({ length: count + 1 }, (_, at) => at * width) : offsetsOf(name, offsets, records).map((at) => at * size);
  check(places.every(Number.isInteger), "format", `${name}: expected whole bytes of each sample`);
  const valid = tensors.get(`${name}.valid`);
  const bits = valid && valid.dtype === "BOOL" && `${valid.shape}` === `${count}` && valid.data.every((byte) => byte < 2);
  check(!valid || bits, "format", `${name}: expected a truth value for each sample`);
  const samples = Array.from({ length: count }, (_, at) => (valid && !valid.data[at] ? null : stored.data.subarray(places[at], places[at + 1])));
  return { form: `${stored.dtype} ${values ? `[${row}]` : "records"} ${!valid}`, samples };
}

const isValid = (name, columns) => name.endsWith(".valid") && columns.includes(name.slice(0, -6));

/** The names of the columns of a shard without `types`, by their tensors alone. */
function guessColumns(tensors) {
  const records = [...tensors.keys()].filter((name) => name.endsWith(".records") && tensors.has(name.slice(0, -8) + ".offsets"));
  const names = new Set(records.map((name) => name.slice(0, -8)));
  const taken = new Set([...names].flatMap((name) => [`${name}.records`, `${name}.offsets`]));
  const rest = [...tensors.keys()].filter((name) => !taken.has(name));
  return [...names, ...rest.filter((name) => !isValid(name, [...names, ...rest]))];
}

/** What a shard says of itself. Names of files need not be UTF-8, and nothing else may have what stands for their bytes then. */
function readAbout(bytes) {
  const told = new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
  const about = ABOUT(json.parse(told));
  check(same(utf8(told), bytes) || !/\ufffd/.test(about.data_set + [...about.types].flat()), "format", "expected UTF-8 but in names of files");
  return about;
}

async function readShard(bytes, keys) {
  const { sealed, key } = await openFile(bytes, keys, "tensor");
  const tensors = new Map(sealed);
  const told = tensors.get("fastrack.about");
  tensors.delete("fastrack.about");
  check(!told || (told.dtype === "U8" && told.shape.length === 1), "format", "expected fastrack.about in U8");
  const about = told && readAbout(told.data);
  const ofFiles = about?.files.reduce((all, [, number]) => all + number, 0);
  check(!about?.files.length || ofFiles === about.samples, "format", "files of another number of samples");
  const listed = about && [...about.types.keys()];
  const names = listed?.filter((name) => !isValid(name, listed)) ?? guessColumns(tensors);
  const columns = new Map(names.map((name) => [name, readColumn(tensors, name)]));
  const known = new Set(names.flatMap((name) => ["", ".records", ".offsets", ".valid"].map((end) => name + end)));
  check(names.length && [...tensors.keys()].every((name) => known.has(name)), "format", "columns other than those of types");
  const valid = (all) => String(all.filter((name) => isValid(name, names)).sort());
  check(!listed || valid(listed) === valid([...tensors.keys()]), "format", "nulls other than those of types");
  const samples = columns.get(names[0]).samples.length;
  check([...columns.values()].every((column) => column.samples.length === samples), "format", "columns of different lengths");
  return { about, columns, samples, key };
}

function checkPlace({ about, samples }, shards, count) {
  const before = shards.at(-1)?.about;
  check(about || !before, "format", "a shard without a description behind one that has it");
  if (!about) return;
  check(about.samples === samples && about.first === count, "format", "a shard in another place");
  const known = shards.filter((shard) => !shard.about).reduce((all, shard) => all + shard.samples, 0);
  check(about.before === known, "format", "shards before that are not the described ones");
  check(about.run === about.first || about.run === before?.run, "format", "a shard of no run");
  check(about.previous === (before?.shard ?? ""), "format", "a shard that does not follow");
  check(!before || about.data_set === before.data_set, "format", "a shard of another dataset");
}

/** A dataset, from a `Map` of the names of its shards to their bytes: samples, columns, and whether it is complete. */
export async function readDataSet(files, keys) {
  const shards = [];
  let count = 0;
  for (let number = 0; number < files.size; number++) {
    const name = `shard-${String(number).padStart(6, "0")}.safetensors`;
    check(files.has(name), "format", `${name} is missing`);
    const shard = await readShard(files.get(name), keys);
    checkPlace(shard, shards, count);
    const forms = ({ columns }) => JSON.stringify([...columns].map(([column, { form }]) => [column, form]).sort());
    check(!shards.length || (forms(shard) === forms(shards[0]) && shard.key === shards[0].key), "format", `${name}: other columns`);
    shards.push(shard);
    count += shard.samples;
  }
  const columns = new Map();
  for (const name of shards[0]?.columns.keys() ?? []) {
    const samples = shards.flatMap((shard) => shard.columns.get(name).samples);
    const parts = samples.flatMap((bytes) => (bytes === null ? [NULL] : [big(bytes.length), bytes]));
    columns.set(name, hex(await hash(join(parts))));
  }
  return { samples: count, columns, complete: shards.at(-1)?.about?.complete ?? false };
}
