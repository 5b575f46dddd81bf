import assert from "node:assert/strict";
import { test } from "node:test";

import { MADE } from "../../dsv4nb/widgets/js/protocol.js";
import {
  blank, isOfLens, look, MEASURES, moved, received, rows, running, sentence, share, sums, visible,
} from "../../dsv4nb/widgets/js/lens-tokens.js";

/** Tokens as they travel: [id, made, logprob | null, entropy, rank, [[id, logprob] …]] */
function packed(tokens, k) {
  const view = (bytes) => new DataView(new ArrayBuffer(bytes));
  const n = tokens.length;
  const [ids, made, logprobs, entropies, ranks] = [4, 1, 4, 4, 4].map((size) => view(size * n));
  const [topIds, topLogprobs] = [view(4 * n * k), view(4 * n * k)];
  tokens.forEach(([id, how, logprob, entropy, rank, top], i) => {
    ids.setInt32(4 * i, id, true);
    made.setUint8(i, MADE.indexOf(how));
    logprobs.setFloat32(4 * i, logprob ?? NaN, true);
    entropies.setFloat32(4 * i, entropy ?? NaN, true);
    ranks.setInt32(4 * i, logprob === null ? 0 : rank, true);
    for (let j = 0; j < k; j += 1) {
      topIds.setInt32(4 * (i * k + j), top[j]?.[0] ?? -1, true);
      topLogprobs.setFloat32(4 * (i * k + j), top[j]?.[1] ?? NaN, true);
    }
  });
  return [ids, made, logprobs, entropies, ranks, ...(k ? [topIds, topLogprobs] : [])].filter((one) => one.byteLength);
}

const K = 2;
const text = (id) => `t${id}`;
const plain = (id, how = "plain") => [id, how, -id / 8, id / 4, 1 + (id % 9), [[id, -id / 8], [id + 1, -9]]];
const texts = (tokens) => [...new Set(tokens.flatMap(([id, , , , , top]) => [id, ...top.map(([one]) => one)]))].map((id) => [id, text(id)]);

function snapshot(run, tokens, extra = {}) {
  const message = {
    ...{ kind: "snapshot", run, label: "q", note: "", live: true, continues: true, scores: false, scoring: false, fork: "" },
    ...{ n: tokens.length, k: K, texts: texts(tokens) }, ...extra,
  };
  return [message, packed(tokens, K)];
}

function frame(run, start, tokens, told = texts(tokens)) {
  return [{ kind: "frame", run, start, n: tokens.length, k: K, texts: told }, packed(tokens, K)];
}

const given = (...messages) => messages.reduce((state, [message, buffers]) => received(state, message, buffers ?? []), blank());
const ids = (state) => state.tokens.map(({ id }) => id);

test("buffers are the tokens, their texts and their alternatives", () => {
  const state = given(snapshot(1, [plain(8, "given"), [3, "accepted", null, null, 0, []]]));
  assert.deepEqual(state.tokens, [
    {
      id: 8, text: "t8", made: "given", logprob: -1, entropy: 2, rank: 9,
      top: [{ id: 8, text: "t8", logprob: -1 }, { id: 9, text: "t9", logprob: -9 }],
    },
    { id: 3, text: "t3", made: "accepted", logprob: null, entropy: null, rank: null, top: [] },
  ]);
});

test("frames go on from what is there, and a repeated or overlapping one doubles nothing", () => {
  const [a, b, c] = [frame(1, 0, [plain(1), plain(2)]), frame(1, 2, [plain(3)]), frame(1, 1, [plain(2), plain(3), plain(4)])];
  const state = given(snapshot(1, []), a, a, b, a, c, b);
  assert.deepEqual([ids(state), state.lost], [[1, 2, 3, 4], false]);
});

test("a gap, another run and a text that was never told ask for a snapshot", () => {
  assert.equal(given(snapshot(1, []), frame(1, 1, [plain(1)])).lost, true);
  assert.equal(given(snapshot(1, []), frame(2, 0, [plain(1)])).lost, true);
  assert.equal(given(snapshot(1, []), frame(1, 0, [plain(1)], [])).lost, true);
  const whole = given(snapshot(1, []), frame(1, 1, [plain(1)]), snapshot(1, [plain(0), plain(1)]));
  assert.deepEqual([ids(whole), whole.lost], [[0, 1], false]);
});

test("what is older than what is shown takes nothing back", () => {
  const state = given(snapshot(2, [plain(1), plain(2)]), snapshot(1, [plain(9)]), snapshot(2, [plain(1)]), frame(1, 0, [plain(7)]));
  assert.deepEqual([ids(state), state.run, state.lost], [[1, 2], 2, false]);
});

test("how a token came about is told after it, and not taken back by a late frame", () => {
  const early = frame(1, 0, [plain(1), plain(2)]);
  const told = frame(1, 1, [plain(2, "accepted")]);
  const state = given(snapshot(1, []), early, told, early);
  assert.deepEqual(state.tokens.map(({ made }) => made), ["plain", "accepted"]);
});

test("whatever is dropped, repeated and late, the tokens are a beginning of the reply or a snapshot is wanted", () => {
  const all = Array.from({ length: 300 }, (_, i) => plain(i % 40));
  let seed = 11;
  const draw = () => (seed = (seed * 1103515245 + 12345) % 2 ** 31) / 2 ** 31;
  for (let round = 0; round < 40; round += 1) {
    let state = given(snapshot(1, []));
    const told = new Set();
    const late = [];
    for (let at = 0; at < all.length; ) {
      const n = 1 + Math.floor(draw() * 6);
      const some = all.slice(at, at + n);
      const fresh = texts(some).filter(([id]) => !told.has(id));
      fresh.forEach(([id]) => told.add(id));
      const message = frame(1, at, some, fresh);
      for (let times = Math.floor(draw() * 3); times > 0; times -= 1) state = received(state, ...message);
      late.push(message);
      if (draw() < 0.2) state = received(state, ...late[Math.floor(draw() * late.length)]);
      at += n;
      if (state.lost && draw() < 0.3) state = received(state, ...snapshot(1, all.slice(0, Math.min(at, all.length))));
      assert.deepEqual(ids(state), all.slice(0, state.tokens.length).map(([id]) => id));
      assert.equal(state.tokens.every((token) => token.text === text(token.id)), true);
    }
    state = received(state, ...snapshot(1, all));
    assert.deepEqual([state.tokens.length, state.lost], [300, false]);
  }
});

test("values are never changed in place", () => {
  const before = given(snapshot(1, [plain(1, "accepted")]));
  const copy = structuredClone(before);
  received(before, ...frame(1, 0, [plain(1), plain(2)]));
  received(before, { kind: "ended", run: 1, note: "x", continues: false, scores: true }, []);
  assert.deepEqual(before, copy);
});

test("the end of another run ends nothing, and its own does", () => {
  const state = given(snapshot(2, [plain(1)]));
  const ended = (run) => received(state, { kind: "ended", run, note: "n", continues: true, scores: true }, []);
  assert.equal(ended(1), state);
  assert.deepEqual([ended(2).live, ended(2).note, ended(2).scores], [false, "n", true]);
});

test("levels by probability, entropy and rank, and how a token came about", () => {
  const token = (more) => ({ id: 1, text: "a", made: "bonus", logprob: null, entropy: null, rank: null, top: [], ...more });
  for (const [p, level] of [[1, 0], [0.9, 0], [0.5, 2], [0.49, 3], [0.1, 4], [0.02, 5], [0.001, 6]]) {
    assert.equal(look(token({ logprob: Math.log(p) + 1e-12 }), "probability"), `dsv4-level-${level}`);
  }
  for (const [entropy, level] of [[0, 0], [0.1, 1], [1, 3], [4, 6], [9, 6]]) {
    assert.equal(look(token({ entropy }), "entropy"), `dsv4-level-${level}`);
  }
  for (const [rank, level] of [[1, 0], [2, 2], [3, 3], [5, 4], [10, 5], [11, 6], [900, 6]]) {
    assert.equal(look(token({ rank }), "rank"), `dsv4-level-${level}`);
  }
  assert.equal(look(token({}), "entropy"), "dsv4-unknown");
  assert.equal(look(token({}), "speculation"), "dsv4-how-bonus");
  for (const { levels } of Object.values(MEASURES)) assert.equal(levels.length, 7);
});

test("sums are over the tokens that were chosen and are known", () => {
  const state = given(snapshot(1, [plain(8, "given"), plain(1), plain(4), plain(2), [5, "plain", null, null, 0, []]]));
  const told = sums(state.tokens, 2);
  assert.deepEqual([told.n, told.lowest], [3, [2, 3]]);
  assert.ok(Math.abs(told.perplexity - Math.exp(7 / 8 / 3)) < 1e-6);
  assert.ok(Math.abs(told.entropy - 7 / 4 / 3) < 1e-6);
  assert.equal(sums([]), null);
});

test("white space is seen", () => {
  assert.deepEqual([" a", "\n", "\t", ""].map(visible), ["␣a", "⏎", "⇥", "∅"]);
  assert.deepEqual(["a b", "\n", ""].map(running), ["a b", "⏎\n", "∅"]);
  assert.deepEqual([0, -0.0001, Math.log(0.123), Math.log(0.00012345), -900].map(share), ["100 %", "100 %", "12.3 %", "0.012 %", "0 %"]);
});

test("a token as a sentence, and as a row", () => {
  const [token] = given(snapshot(1, [plain(8, "correction")])).tokens;
  assert.equal(
    sentence(token, 3),
    "Token 3, “t8”, probability 36.8 %, rank 9, entropy 2.00 nats, else “t9” with 0.012 %, the model's correction of a rejected draft.",
  );
  assert.match(sentence({ ...token, text: " \n", logprob: null }, 0), /^Token 0, space line break, the model's/);
  const [head, row] = rows([token], 0, 5);
  assert.equal(head.length, row.length);
  assert.deepEqual(row, ["0", "t8", "8", "36.8 %", "-1.000", "9", "2.000", "correction", "t9 0.012 %"]);
});

test("keys move within the tokens", () => {
  const line = (step) => 50 + step;
  const found = ["ArrowLeft", "ArrowRight", "Home", "End", "ArrowDown", "ArrowUp", "a"].map((key) => moved(0, key, 80, line));
  assert.deepEqual(found, [0, 1, 0, 79, 51, 49, null]);
  assert.equal(moved(79, "ArrowRight", 80, line), 79);
});

test("messages of other panels are not the lens's", () => {
  assert.equal(isOfLens({ kind: "frame", run: 1, start: 0, tokens: [] }), false);
  assert.equal(isOfLens(frame(1, 0, [plain(1)])[0]), true);
  assert.equal(isOfLens(undefined), false);
});
