import assert from "node:assert/strict";
import { test } from "node:test";

import { facts, headline, isGoing, left, part, size } from "../../dsv4nb/widgets/js/load-words.js";

const going = {
  state: "loading", phase: "reading weights", done: 42e9, total: 167e9, rate: 2.5e9, eta: 50, elapsed: 17.4,
  n_shard: 12, n_shards: 46, placed: [["cuda:0", 21e9], ["cuda:1", 20.5e9]],
};

test("what is known of a load", () => {
  assert.deepEqual(facts(going), [
    ["read", "42.0 GB of 167.0 GB"], ["rate", "2.5 GB/s"], ["left", "50 s"], ["so far", "17 s"], ["file", "12 of 46"],
    ["on cuda:0", "21.0 GB"], ["on cuda:1", "20.5 GB"],
  ]);
  const early = { ...going, done: 0, total: 0, rate: null, eta: null, n_shards: 0, placed: [] };
  assert.deepEqual(facts(early), [["so far", "17 s"]]);
  assert.equal(part(early), null);
  assert.equal(part({ ...going, done: 83.5e9 }), 0.5);
});

test("what is left is no more exact than it is known", () => {
  assert.deepEqual([0.2, 12.4, 89, 91, 5000, 9000].map(left), ["1 s", "12 s", "89 s", "2 min", "83 min", "2.5 h"]);
});

test("the line beside the title", () => {
  const told = ["loading", "cancelling", "cancelled", "failed", "waiting"].map((state) => headline({ ...going, state }));
  assert.deepEqual(told, ["reading weights", "cancelling", "cancelled", "failed", ""]);
  assert.equal(headline({ state: "loaded", elapsed: 3.456 }), "loaded in 3.46 s");
  assert.equal(headline({ state: "loaded", elapsed: 95.2 }), "loaded in 95 s");
  assert.deepEqual(["loading", "cancelling", "loaded"].map((state) => isGoing({ state })), [true, true, false]);
});

test("sizes", () => {
  assert.deepEqual([0, 999, 1500, 2.5e6, 3e9].map(size), ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 GB"]);
});
