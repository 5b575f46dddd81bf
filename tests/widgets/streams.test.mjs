// The rules of PROTOCOL.md at the page: messages of a stream are dropped, repeated and delivered out of order at random.

import assert from "node:assert/strict";
import { test } from "node:test";

import { blank, received } from "../../dsv4nb/widgets/js/rounds.js";
import { begun, caughtUp, extended, opened, settled } from "../../dsv4nb/widgets/js/transcript.js";

function chance(seed) {
  let state = seed;
  const draw = () => (state = (state * 1103515245 + 12345) % 2 ** 31) / 2 ** 31;
  return { draw, pick: (n) => Math.floor(draw() * n) };
}

/**
 * Send `n` items in frames over a bad line.
 * @param {(start: number, end: number) => object} frame @param {(n: number) => object} snapshot
 * @param {(state: any, message: object) => any} take
 * @param {(state: any) => void} check what holds whatever has happened
 */
function badLine(seed, { n, frame, snapshot, take, state, count, check }) {
  const { draw, pick } = chance(seed);
  let line = [];
  for (let at = 0; at < n; ) {
    const end = Math.min(n, at + 1 + pick(6));
    for (let times = pick(3); times > 0; times -= 1) line.push(frame(at, end));
    if (line.length > 1 && draw() < 0.3) {
      const [i, j] = [pick(line.length), pick(line.length)];
      [line[i], line[j]] = [line[j], line[i]];
    }
    at = end;
    while (line.length > 0 && draw() < 0.7) {
      state = take(state, line.shift());
      check(state);
    }
    if (state.lost && draw() < 0.3) line.push(snapshot(Math.max(0, at - pick(4)))); // taken before some that come first
  }
  for (const message of line) {
    state = take(state, message);
    check(state);
  }
  state = take(state, snapshot(n));
  check(state);
  assert.deepEqual([count(state), state.lost], [n, false]);
}

const seeds = Array.from({ length: 60 }, (_, i) => 17 * i + 1);

test("a transcript over a bad line is a beginning of the run, and whole after a snapshot", () => {
  const letters = ["c", "r", "h", "t", "c", "c"];
  const tokens = Array.from({ length: 240 }, (_, i) => [letters[i % 6], `${i}😀 `]);
  const joined = (letter, end) => tokens.slice(0, end).filter(([one]) => one === letter).map(([, text]) => text).join("");
  const begin = { kind: "begin", run: 3, user: "q", command: "" };
  for (const seed of seeds) {
    badLine(seed, {
      n: tokens.length,
      state: begun(opened({ turns: [], ended: 0 }), begin),
      frame: (start, end) => ({ kind: "frame", run: 3, start, tokens: tokens.slice(start, end) }),
      snapshot: (next) => ({
        ...begin, kind: "snapshot", next, text: joined("c", next), reasoning: joined("r", next),
        n_reasoning: tokens.slice(0, next).filter(([one]) => one === "r").length, cards: [], is_calling: false,
      }),
      take: (state, message) => (message.kind === "frame" ? extended(state, message) : caughtUp(state, message)),
      count: (state) => state.live.next,
      check: ({ live }) => {
        assert.equal(live.text, joined("c", live.next));
        assert.equal(live.reasoning, joined("r", live.next));
      },
    });
  }
});

test("rounds over a bad line are the first of the reply, and all of them after a snapshot", () => {
  const told = (i) => [0, i, i, "p", [], 0, 0, "n", "bonus", 1, null, [1, 1, 1, 3], "", "", `c${i}`];
  const rounds = Array.from({ length: 200 }, (_, i) => told(i));
  const start = { kind: "snapshot", run: 2, label: "", note: "", live: true, rewinds: false, mode: "exact", figures: null };
  for (const seed of seeds) {
    badLine(seed, {
      n: rounds.length,
      state: received(blank(), { ...start, rounds: [] }),
      frame: (first, end) => ({ kind: "frame", run: 2, start: first, rounds: rounds.slice(first, end), figures: null }),
      snapshot: (n) => ({ ...start, rounds: rounds.slice(0, n) }),
      take: received,
      count: (state) => state.rounds.length,
      check: (state) => state.rounds.forEach((round, i) => assert.deepEqual([round.round, round.content], [i, `c${i}`])),
    });
  }
});

test("messages of a run that is over, or was followed by another, change nothing", () => {
  const over = settled(begun(opened({ turns: [], ended: 0 }), { run: 1, user: "q", command: "" }), { turns: [], ended: 1 });
  assert.equal(extended(over, { run: 1, start: 0, tokens: [["c", "a"]] }), over);
  const next = begun(over, { run: 2, user: "q", command: "" });
  assert.equal(extended(next, { run: 1, start: 0, tokens: [["c", "a"]] }), next);
});
