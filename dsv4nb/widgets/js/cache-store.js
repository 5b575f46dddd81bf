// Texts and arrays that were pulled, by the ids that they are of: no page, so that node can test it.

export const TILE = 512; // tokens whose texts are asked for at once

/** Texts of one sequence, tile by tile. @param {(first: number, last: number) => void} ask */
export function texts(ask) {
  let key = "";
  let n = 0;
  let pieces = [];
  let asked = new Set();
  return {
    /** Begin another sequence; what is known of it already stays. */
    turn(to, length) {
      if (to === key) return;
      [key, n, pieces, asked] = [to, length, [], new Set()];
    },
    /** The text of a token; undefined, and asked for, when it is not known yet. */
    at(position) {
      if (position < 0 || position >= n) return undefined;
      const tile = Math.floor(position / TILE);
      if (!asked.has(tile)) {
        asked.add(tile);
        ask(tile * TILE, Math.min(n, (tile + 1) * TILE));
      }
      return pieces[position];
    },
    /** The text of positions first … last - 1; "" where it is not known yet. */
    join(first, last) {
      let out = "";
      for (let i = first; i < last; i += 1) out += this.at(i) ?? "";
      return out;
    },
    /** @returns {boolean} whether the message is of this sequence */
    received(message) {
      if (message.key !== key) return false;
      message.pieces.forEach((piece, i) => (pieces[message.first + i] = piece));
      return true;
    },
    /** A tile could not be had; it is asked for again when it is needed. */
    lost() {
      asked = new Set([...asked].filter((tile) => pieces[tile * TILE] !== undefined));
    },
  };
}

const typed = (Kind, view) => new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

/** @param {DataView[]} buffers of a message "reads" */
export function readsOf(message, buffers) {
  const [rows, entries, mass, scores] = buffers;
  return {
    token: message.token,
    layer: message.layer,
    told: message.told,
    rows: typed(Float32Array, rows),
    entries: typed(Int32Array, entries),
    mass: typed(Float32Array, mass),
    scores: typed(Float32Array, scores),
  };
}

/** @param {DataView[]} buffers of a message "experts" */
export function expertsOf(message, buffers) {
  return { ...message.told, first: message.first, last: message.last, counts: typed(Int32Array, buffers[0]) };
}
