// Quantised values, widened to BF16.
import { rowsAndColumns } from "./sealed.mjs";

/** A float of 8 bits: `mantissa` bits of it after the exponent. F8_E4M3 has no infinity, and one NaN for each sign. */
function float8(byte, mantissa, bias, hasInfinity) {
  const [sign, exponent, fraction] = [byte >> 7 ? -1 : 1, (byte & 127) >> mantissa, byte & ((1 << mantissa) - 1)];
  const [top, ones] = [(1 << (7 - mantissa)) - 1, (1 << mantissa) - 1];
  if (exponent === top && hasInfinity) return fraction ? NaN : sign * Infinity;
  if (exponent === top && fraction === ones) return NaN;
  const significand = fraction / (1 << mantissa) + (exponent ? 1 : 0);
  return sign * significand * 2 ** (Math.max(exponent, 1) - bias);
}

const VALUE = {
  F8_E4M3: (byte) => float8(byte, 3, 7, false),
  F8_E5M2: (byte) => float8(byte, 2, 15, true),
  I8: (byte) => (byte << 24) >> 24,
};
const SCALE = {
  F32: (view, index) => view.getFloat32(4 * index, true),
  BF16: (view, index) => new Float32Array(Uint32Array.of(view.getUint16(2 * index, true) << 16).buffer)[0],
};

/** The values of a claim in BF16, little-endian, from their plaintext and that of their scales. */
export function widen({ dtype, shape, scale }, values, scales) {
  const [rows, columns] = rowsAndColumns(shape);
  const [high, wide] = scale.block;
  const view = new DataView(scales.buffer, scales.byteOffset, scales.length);
  const wideRow = Math.ceil(columns / wide);
  const table = Array.from({ length: 256 }, (_, byte) => VALUE[dtype](byte));
  const [product, out] = [new Float32Array(1), new DataView(new ArrayBuffer(2 * values.length))];
  const bits = new Uint32Array(product.buffer);
  for (let row = 0, at = 0; row < rows; row++)
    for (let column = 0; column < columns; column++, at++) {
      const factor = SCALE[scale.dtype](view, Math.floor(row / high) * wideRow + Math.floor(column / wide));
      product[0] = table[values[at]] * factor; // exact in float64, so that it is rounded once, to float32
      const rounded = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) >>> 16; // and once more, to nearest even
      out.setUint16(2 * at, Number.isNaN(product[0]) ? 0x7fc0 : rounded, true);
    }
  return new Uint8Array(out.buffer);
}
