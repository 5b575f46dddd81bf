import assert from "node:assert/strict";
import { test } from "node:test";

import { expertsOf, readsOf, texts, TILE } from "../../dsv4nb/widgets/js/cache-store.js";
import {
  awayWords, decisionWords, entryRows, expertWords, inWindow, kindOf, ledgerFacts, moved, ordered, quoted, readsWords,
  size, span, tokenWords,
} from "../../dsv4nb/widgets/js/cache-words.js";

const ledger = { key: "k", label: "this chat", n: 100, reused: 40, prompt: 70, window: 64, anchors: [32, 70] };

test("every position is reused, computed or generated", () => {
  const kinds = Array.from({ length: 100 }, (_, i) => kindOf(i, ledger));
  assert.deepEqual([kinds[39], kinds[40], kinds[69], kinds[70]], ["reused", "computed", "computed", "generated"]);
  const facts = Object.fromEntries(ledgerFacts(ledger));
  assert.deepEqual(facts, { committed: "100 tokens", reused: "40", computed: "30", generated: "30", window: "from token 36", anchors: "at 32, 70" });
});

test("ids that came with a snapshot are told without a run", () => {
  const held = { ...ledger, reused: 100, prompt: 0, window: 0, anchors: [] };
  assert.equal(kindOf(99, held), "reused");
  assert.deepEqual(ledgerFacts(held), [["committed", "100 tokens"], ["anchors", "none"]]);
});

test("a token is told with its window and its anchor", () => {
  assert.equal(inWindow(35, ledger), false);
  assert.equal(inWindow(36, ledger), true);
  assert.equal(tokenWords(69, ledger, " a\n"), "token 69 · ‘·a⏎’ · computed · in the window · an anchor of 70 tokens ends here");
  assert.equal(quoted(undefined), "…");
});

test("keys lead through a grid and stay in it", () => {
  const grid = { n: 100, columns: 30, page: 2 };
  assert.deepEqual(["ArrowRight", "ArrowDown", "PageDown", "End", "Home", "ArrowUp"].map((key) => moved(50, key, grid)), [51, 80, 99, 99, 0, 20]);
  assert.equal(moved(50, "x", grid), null);
});

test("decisions are told with where the prompt left the cache", () => {
  assert.deepEqual(decisionWords({ kind: "anchor", length: 1200, prompt: 1210, computed: 10 }), ["from an anchor", "1,200 of 1,210 prompt tokens reused, 10 rows computed"]);
  assert.equal(decisionWords({ kind: "exact", length: 9, prompt: 9, computed: 0 })[1], "9 of 9 prompt tokens reused, nothing computed");
  assert.equal(awayWords(null), "");
  assert.equal(awayWords([57, " Paris", " Rome"]), "Leaves the cache at token 57: cached is ‘·Paris’, the prompt has ‘·Rome’.");
  assert.equal(awayWords([57, " Paris", null]), "Leaves the cache at token 57: cached is ‘·Paris’, the prompt ends there.");
});

test("an entry is told with what it stands for and what it pools", () => {
  const reads = { told: { ratio: 4, reach: 8 }, entries: [0, 5, 2], mass: [0.1, 0.2, 0.3], scores: [3, 1, 2] };
  const rows = entryRows(reads);
  assert.deepEqual(rows.map(({ from, first, last }) => [from, first, last]), [[0, 0, 4], [16, 20, 24], [4, 8, 12]]);
  assert.deepEqual(["mass", "score", "position"].map((by) => ordered(rows, by).map((one) => one.entry)), [[2, 5, 0], [0, 2, 5], [0, 2, 5]]);
  assert.deepEqual([span(20, 24), span(7, 8)], ["20–23", "7"]);
  const wide = entryRows({ told: { ratio: 128, reach: 128 }, entries: [1], mass: [0.5], scores: [] });
  assert.deepEqual(wide, [{ entry: 1, first: 128, last: 256, from: 128, mass: 0.5, score: null }]);
});

test("what was read is one sentence", () => {
  const told = { ratio: 4, rows: 64, entries: 32, visible: 70, sink: 0.01 };
  assert.equal(readsWords(281, ".", told, { rows: 0.66, entries: 0.33 }), "Token 281 ‘.’ read 64 rows of the window (66.0 %), 32 of 70 entries (33.0 %) and the sink (1.0 %).");
  assert.equal(readsWords(0, "a", { ratio: 0, rows: 1, sink: 0.2 }, { rows: 0.8, entries: 0 }), "Token 0 ‘a’ read 1 row of the window (80.0 %) and the sink (20.0 %).");
  assert.equal(expertWords(3, 5, 40, 160, "score"), "layer 3, expert 5: 40 of 160 tokens (25.0 %), routed by score");
});

test("bytes are told as people read them", () => {
  assert.deepEqual([0, 1023, 2048, 2 ** 20, 1.5 * 2 ** 30].map(size), ["0 B", "1,023 B", "2 KiB", "1 MiB", "1.5 GiB"]);
});

test("texts are asked for once a tile, and those of others are left", () => {
  const asked = [];
  const store = texts((first, last) => asked.push([first, last]));
  store.turn("a", TILE + 3);
  assert.equal(store.at(0), undefined);
  store.at(1);
  store.at(TILE + 1);
  store.at(TILE + 3);
  assert.deepEqual(asked, [[0, TILE], [TILE, TILE + 3]]);
  assert.equal(store.received({ key: "b", first: 0, pieces: ["x"] }), false);
  assert.equal(store.received({ key: "a", first: 0, pieces: ["x", "y"] }), true);
  assert.equal(store.join(0, 2), "xy");
  store.lost(); // the second tile
  store.at(TILE);
  assert.equal(asked.length, 3);
  store.turn("b", 1);
  assert.equal(store.at(0), undefined);
  assert.deepEqual(asked[3], [0, 1]);
});

test("arrays come out of buffers at any offset", () => {
  const view = (array) => {
    const bytes = new Uint8Array(array.byteLength + 1);
    bytes.set(new Uint8Array(array.buffer), 1);
    return new DataView(bytes.buffer, 1);
  };
  const buffers = [new Float32Array([0.5, 0.25]), new Int32Array([7]), new Float32Array([0.125]), new Float32Array(0)].map(view);
  const reads = readsOf({ token: 3, layer: 2, told: {} }, buffers);
  assert.deepEqual([[...reads.rows], [...reads.entries], [...reads.mass], reads.scores.length], [[0.5, 0.25], [7], [0.125], 0]);
  const map = expertsOf({ first: 0, last: 2, told: { layers: 1, experts: 2, tokens: 2 } }, [view(new Int32Array([1, 3]))]);
  assert.deepEqual([[...map.counts], map.experts], [[1, 3], 2]);
});
