import assert from "node:assert/strict";
import { test } from "node:test";

import {
  asked, begun, called, caughtUp, extended, isWaiting, mark, opened, pace, phase, settled, thought, withdrawn,
} from "../../dsv4nb/widgets/js/transcript.js";

const entry = (text) => ({
  user: "q", reasoning: "", text, cards: [], is_calling: false, stop_reason: "stop", n_tokens: 1, n_reasoning: 0, seconds: 1,
  footer: "1 token", error: "",
});
const none = { cards: [], is_calling: false };
const card = (state, result = "") => ({ name: "f", state, result });
const blank = () => opened({ turns: [], ended: 0 });
const begin = { run: 1, user: "q", command: "a-1" };
const frame = (start, ...texts) => ({ run: 1, start, tokens: texts.map((text) => ["c", text]) });
const running = (...frames) => frames.reduce(extended, begun(blank(), begin));

test("tokens go to their channels and hidden ones are only counted", () => {
  const state = extended(begun(blank(), begin), {
    run: 1, start: 0, tokens: [["r", "hm"], ["h", "</think>"], ["c", "yes"], ["t", "<call>"]],
  });
  const { reasoning, text, next, n_reasoning } = state.live;
  assert.deepEqual([reasoning, text, next, n_reasoning], ["hm", "yes", 4, 1]);
  assert.equal(JSON.stringify(state).includes("<call>"), false, "what a call is written in is nobody's to see");
});

test("a repeated or overlapping frame doubles nothing", () => {
  const state = running(frame(0, "a", "b"), frame(0, "a", "b"), frame(1, "b", "c"), frame(0, "a"));
  assert.equal(state.live.text, "abc");
  assert.equal(state.lost, false);
});

test("m56: text that comes one character a frame is the text, whatever it takes to store one", () => {
  const text = "a😀b｜DSML｜’";
  const characters = [...text];
  assert.notEqual(characters.length, text.length); // the pair of halves counts twice here and once in Python
  const state = running(...characters.map((character, i) => frame(i, character)));
  assert.deepEqual([state.live.text, state.live.next, state.lost], [text, characters.length, false]);
});

test("a gap asks for a snapshot and shows nothing out of order", () => {
  const gap = running(frame(0, "a"), frame(2, "c"));
  assert.equal(gap.lost, true);
  assert.equal(gap.live.text, "a");
  const whole = caughtUp(gap, { ...begin, next: 3, reasoning: "", text: "abc", n_reasoning: 0, ...none });
  assert.equal(whole.lost, false);
  assert.equal(extended(whole, frame(2, "c", "d")).live.text, "abcd");
});

test("a snapshot that is older than what is shown takes nothing back", () => {
  const old = { ...begin, next: 1, reasoning: "", text: "a", n_reasoning: 0, ...none };
  assert.equal(caughtUp(running(frame(0, "a", "b")), old).live.text, "ab");
});

test("whatever is dropped and repeated, the text is a beginning of the run or a snapshot is wanted", () => {
  const tokens = Array.from({ length: 300 }, (_, i) => `t${i} `);
  let seed = 7;
  const draw = () => (seed = (seed * 1103515245 + 12345) % 2 ** 31) / 2 ** 31;
  for (let round = 0; round < 50; round += 1) {
    let state = begun(blank(), begin);
    let at = 0;
    while (at < tokens.length) {
      const n = 1 + Math.floor(draw() * 6);
      const message = { run: 1, start: at, tokens: tokens.slice(at, at + n).map((text) => ["c", text]) };
      for (let times = Math.floor(draw() * 3); times > 0; times -= 1) state = extended(state, message);
      at += n;
      if (state.lost && draw() < 0.3) {
        const next = Math.min(at, tokens.length);
        const text = tokens.slice(0, next).join("");
        state = caughtUp(state, { ...begin, next, reasoning: "", text, n_reasoning: 0, ...none });
      }
      assert.equal(state.live.text, tokens.slice(0, state.live.next).join(""));
    }
  }
});

test("frames of a run that nobody announced ask for a snapshot", () => {
  assert.equal(extended(blank(), frame(0, "a")).lost, true);
});

test("what comes after the end of its run is dropped", () => {
  const over = settled(running(frame(0, "a")), { turns: [entry("a")], ended: 1 });
  assert.equal(over.live, null);
  assert.equal(extended(over, frame(0, "a")), over);
  assert.equal(begun(over, begin), over);
  assert.equal(caughtUp(over, { ...begin, next: 1, reasoning: "", text: "a", n_reasoning: 0, ...none }), over);
});

test("a question waits until its run begins or it is taken back", () => {
  const waiting = asked(blank(), "a-1", "q");
  assert.equal(phase(waiting), "asked");
  assert.equal(begun(waiting, begin).pending, null);
  assert.equal(begun(waiting, { ...begin, command: "b-9" }).pending.id, "a-1", "another view's run is not mine");
  assert.equal(withdrawn(waiting, "a-1").pending, null);
  assert.equal(withdrawn(waiting, "a-2").pending.id, "a-1");
});

test("phases follow the channels", () => {
  const started = begun(blank(), begin);
  assert.equal(phase(blank()), "idle");
  assert.equal(phase(started), "reading");
  assert.equal(phase(extended(started, { run: 1, start: 0, tokens: [["r", "hm"]] })), "thinking");
  assert.equal(phase(extended(started, frame(0, "a"))), "answering");
});

test("values are never changed in place", () => {
  const before = running(frame(0, "a"));
  const copy = structuredClone(before);
  extended(before, frame(1, "b"));
  settled(before, { turns: [entry("a")], ended: 1 });
  assert.deepEqual(before, copy);
});

test("endings in words", () => {
  assert.equal(mark({ ...entry(""), stop_reason: "cancelled" }), "Stopped");
  assert.equal(mark({ ...entry(""), error: "out of memory" }), "Failed: out of memory");
  assert.equal(mark(entry("a")), "");
  assert.equal(thought({ n_reasoning: 1 }, false), "Thought for 1 token");
  assert.equal(thought({ n_reasoning: 1, reasoning_s: 2.1 }, false), "Thought for 1 token, 2.1 s");
  assert.equal(thought({ n_reasoning: 5 }, true), "Thinking… 5 tokens");
  assert.equal(thought({ n_reasoning: 5 }, true, 0.31), "Thinking… 5 tokens, 0.3 s");
  assert.equal(thought({ n_reasoning: null }, false), "Thoughts");
  assert.equal(pace(30, 1.5), "30 tokens · 20.0 tok/s");
  assert.equal(pace(0, 1), "");
});

test("a call is told when it begins, runs and has its result, and the dots only where nothing else tells", () => {
  let state = extended(begun(blank(), begin), { run: 1, start: 0, tokens: [["t", "<call>"]] });
  assert.deepEqual([phase(state), state.live.is_calling, isWaiting(state.live)], ["calling", true, true]);
  state = called(state, { run: 1, index: 0, card: card("running") });
  assert.deepEqual([phase(state), state.live.is_calling, isWaiting(state.live)], ["calling", false, false]);
  state = extended(state, { run: 1, start: 1, tokens: [["t", "</call>"]] });
  assert.equal(state.live.is_calling, false, "the rest of the block begins no call");
  state = called(state, { run: 1, index: 0, card: card("answered", "21") });
  assert.deepEqual([phase(state), isWaiting(state.live)], ["reading", true]);
  state = extended(state, { run: 1, start: 2, tokens: [["c", "It is 21."]] });
  assert.deepEqual([phase(state), isWaiting(state.live)], ["answering", false]);
  assert.deepEqual(state.live.cards, [card("answered", "21")]);
});

test("a call that is repeated, late or lost doubles nothing and takes no result back", () => {
  const two = [card("answered", "21"), card("running")];
  let state = two.reduce((now, shown, index) => called(now, { run: 1, index, card: shown }), begun(blank(), begin));
  state = called(state, { run: 1, index: 0, card: card("running") });
  assert.deepEqual(state.live.cards, two);
  const old = { ...begin, next: 0, reasoning: "", text: "", n_reasoning: 0, cards: [card("running")], is_calling: true };
  state = caughtUp(state, old);
  assert.deepEqual([state.live.cards, state.live.is_calling], [two, false]);
  const gap = called(begun(blank(), begin), { run: 1, index: 1, card: card("running") });
  assert.deepEqual([gap.lost, gap.live.cards], [true, []]);
  assert.equal(called(blank(), { run: 1, index: 0, card: card("running") }).lost, true);
  const late = caughtUp(gap, { ...old, next: 3, cards: two, is_calling: false });
  assert.deepEqual([late.lost, late.live.cards], [false, two]);
});

test("another branch is shown as it is saved, and a call after the end changes nothing", () => {
  const over = settled(running(frame(0, "a")), { ended: 1, turns: [entry("a"), entry("b")] });
  assert.equal(called(over, { run: 1, index: 0, card: card("running") }), over);
  const back = settled(over, { ended: 1, turns: [entry("a")] });
  assert.deepEqual([back.turns.length, back.ended, back.live], [1, 1, null]);
});

test("turns that are the same stay the same values, so that nothing is done for them", () => {
  const before = settled(blank(), { ended: 1, turns: [entry("a"), { ...entry("b"), cards: [card("answered", "1")] }] });
  const after = settled(before, { ended: 2, turns: [entry("a"), { ...entry("b"), cards: [card("answered", "2")] }, entry("c")] });
  assert.equal(after.turns[0], before.turns[0]);
  assert.notEqual(after.turns[1], before.turns[1]);
  assert.equal(after.turns.length, 3);
});
