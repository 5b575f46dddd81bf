import assert from "node:assert/strict";
import { test } from "node:test";

import { doing, ended, rate, since, span, summary } from "../../dsv4nb/widgets/js/queue-words.js";

const one = { id: 1, state: "queued", n_prompt: 100, n_read: 0, n_tokens: 0, rate: null };

test("what a request is doing", () => {
  assert.deepEqual(doing(one), { word: "waiting", part: null });
  assert.deepEqual(doing({ ...one, state: "running", n_read: 25 }), { word: "reading the prompt", part: 0.25 });
  assert.deepEqual(doing({ ...one, state: "running", n_read: 100, n_tokens: 3 }), { word: "answering", part: null });
});

test("how it ended", () => {
  assert.equal(ended({ state: "done", outcome: "length" }), "token limit");
  assert.equal(ended({ state: "cancelled", outcome: "cancelled" }), "cancelled");
  assert.equal(ended({ state: "failed", outcome: "memory ran out" }), "failed");
});

test("spans and rates", () => {
  assert.deepEqual([0, 0.02, 0.8, 12.34, 61, 3725].map(span), ["0 s", "20 ms", "800 ms", "12.3 s", "1 min 1 s", "1 h 2 min"]);
  assert.equal(since(0.8), "0.8 s");
  assert.equal(rate({ rate: null }), "–");
  assert.equal(rate({ rate: 8.25 }), "8.3 tok/s");
});

test("the line beside the title counts those that are not listed too", () => {
  const state = { waiting: [{ ...one, state: "running" }, one], more: 4998, closed: false };
  assert.equal(summary(state), "1 running · 4,999 waiting");
  assert.equal(summary({ ...state, waiting: [], more: 0 }), "idle");
  assert.equal(summary({ ...state, closed: true }), "the model is closed");
});
