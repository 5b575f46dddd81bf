import assert from "node:assert/strict";
import { test } from "node:test";

import { counterfactual, chance, number, roundFacts, roundSentence, slotFacts, slotSentence, speedOnly, visible } from "../../dsv4nb/widgets/js/rounds-words.js";
import { hit, lanes, middle, PITCH } from "../../dsv4nb/widgets/js/rounds-canvas.js";
import { blank, decoded, isOfRounds, moved, received, slots, textBefore } from "../../dsv4nb/widgets/js/rounds.js";

const draft = (status, { text = " d", chosen = null, conf = 0.5, p = 0.25, margin = 1.5 } = {}) => [text, chosen, status, conf, conf, margin, 0.5, p];
const told = (number, drafts = [draft("a"), draft("r", { chosen: " x" }), draft("u")], { reply = 0, content = `c${number} `, reasoning = "", accepts = 1 } = {}) =>
  [reply, number, 10, "p", drafts, accepts, drafts.length, " x", "correction", accepts + 1, null, [1, 2, null, 4], "all drafts", reasoning, content];
const snapshot = (run, ...rounds) => ({ kind: "snapshot", run, label: "q", note: "", live: true, rewinds: true, mode: "exact", rounds, figures: null });
const frame = (run, start, ...rounds) => ({ kind: "frame", run, start, rounds, figures: null });
const play = (...messages) => messages.reduce(received, blank());
const numbers = (state) => state.rounds.map((round) => round.round);

test("rounds are put together in order, whatever is repeated or overlaps", () => {
  const state = play(snapshot(1, told(0)), frame(1, 1, told(1)), frame(1, 1, told(1)), frame(1, 0, told(0), told(1), told(2)));
  assert.deepEqual(numbers(state), [0, 1, 2]);
  assert.equal(state.lost, false);
});

test("a lost frame asks for a snapshot, which then tells everything", () => {
  const gap = play(snapshot(1, told(0)), frame(1, 2, told(2)));
  assert.deepEqual([numbers(gap), gap.lost], [[0], true]);
  const whole = received(gap, snapshot(1, told(0), told(1), told(2)));
  assert.deepEqual([numbers(whole), whole.lost], [[0, 1, 2], false]);
});

test("a snapshot that was overtaken takes nothing away", () => {
  const state = play(snapshot(1, told(0), told(1)), snapshot(1, told(0)));
  assert.deepEqual(numbers(state), [0, 1]);
});

test("news of another run: an older one is dropped, one never begun asks for a snapshot", () => {
  const before = play(snapshot(2, told(0)));
  assert.equal(received(before, frame(1, 1, told(1))), before);
  assert.equal(received(before, { kind: "ended", run: 1, note: "", rewinds: true }), before);
  assert.equal(received(before, snapshot(1, told(0), told(1))), before);
  assert.equal(received(before, frame(3, 0, told(0))).lost, true);
});

test("what was computed of one reply is not kept for the next", () => {
  const swept = received(play(snapshot(1, told(0))), { kind: "sweep", run: 1, n: 1, points: [1], note: "" });
  assert.equal(swept.sweep.n, 1);
  assert.equal(received(swept, snapshot(2, told(0))).sweep, null);
  assert.equal(received(swept, snapshot(1, told(0), told(1))).sweep.n, 1);
});

test("figures come with a frame or not at all, and stay", () => {
  const figures = { n: 1 };
  const state = play(snapshot(1, told(0)), { ...frame(1, 1), figures }, frame(1, 1, told(1)));
  assert.deepEqual([state.figures, numbers(state)], [figures, [0, 1]]);
});

test("m56: 5,000 rounds, one a frame, are all there", () => {
  let state = play(snapshot(1));
  for (let i = 0; i < 5000; i += 1) state = received(state, frame(1, i, told(i)));
  assert.deepEqual(numbers(state), Array.from({ length: 5000 }, (_, i) => i));
});

test("statuses are told in full", () => {
  const round = decoded(told(0, ["a", "r", "u", "n", "s"].map((letter) => draft(letter))));
  assert.deepEqual(round.drafts.map(({ status }) => status), ["accepted", "rejected", "unreached", "not_verified", "past_stop"]);
  assert.equal(slots([round]), 5);
});

test("the text up to a round is what all rounds before it said, in its own reply and from its end", () => {
  const { rounds } = play(snapshot(1, told(0), told(1), told(2, [draft("a")], { reasoning: "hm" }), told(0, [draft("a")], { reply: 1, content: "other" })));
  assert.deepEqual(textBefore(rounds, 2), { reasoning: "hm", content: "c0 c1 c2 ", isCut: false });
  assert.deepEqual(textBefore(rounds, 3), { reasoning: "", content: "other", isCut: false });
  assert.deepEqual(textBefore(rounds, 2, 5), { reasoning: "hm", content: " c2 ".padStart(5, "1"), isCut: true });
});

test("keys move between rounds and drafts, and stay within them", () => {
  const { rounds } = play(snapshot(1, told(0), told(1, [draft("a")]), told(2)));
  const go = (from, ...keys) => keys.reduce((at, key) => moved(at, key, rounds, 2), from);
  assert.deepEqual(go({ round: 0, slot: 2 }, "ArrowRight"), { round: 1, slot: 0 }, "a shorter column");
  assert.deepEqual(go({ round: 0, slot: 0 }, "ArrowLeft", "End", "ArrowDown", "ArrowDown", "ArrowDown"), { round: 2, slot: 2 });
  assert.deepEqual(go({ round: 2, slot: 1 }, "PageUp", "ArrowUp", "ArrowUp", "ArrowUp"), { round: 0, slot: -1 });
  assert.deepEqual(go({ round: 2, slot: 1 }, "Home"), { round: 0, slot: 1 });
  assert.equal(moved({ round: 0, slot: 0 }, "x", rounds, 2), null);
});

test("a pointer finds the slot whose middle it is on, and nothing behind the last round", () => {
  const { rounds } = play(snapshot(1, told(0), told(1)));
  const at = lanes(3, { conf: true, ms: true });
  for (const target of [{ round: 0, slot: 0 }, { round: 1, slot: 2 }]) {
    const { x, y } = middle(target, at);
    assert.deepEqual(hit(x, y, rounds, at), target);
  }
  assert.deepEqual(hit(3, at.tokens + 4, rounds, at), { round: 0, slot: -1 });
  assert.equal(hit(2 * PITCH + 1, 4, rounds, at), null);
});

test("lanes that nobody measured take no place", () => {
  const bare = lanes(3, { conf: false, ms: false });
  assert.deepEqual([bare.conf, bare.ms], [null, null]);
  assert.ok(bare.height < lanes(3, { conf: true, ms: true }).height);
});

test("a slot is told in words: what was drafted, what was chosen, how sure, and what became of it", () => {
  const round = decoded(told(12));
  assert.deepEqual(slotFacts(round, 1).slice(0, 3), [["drafted", "␣d"], ["chosen", "␣x"], ["p (model)", "0.250"]]);
  assert.equal(
    slotSentence(round, 1),
    "Round 12, draft 2 of 3: rejected, the model chose another token. Drafted ␣d, chosen ␣x. p 0.250, q 0.500, confidence 0.500.",
  );
  assert.equal(slotFacts(round, 2)[1][1], "nothing");
  assert.equal(roundSentence(round), "Round 12: 1 of 3 verified drafts accepted, 2 tokens, 4.0 ms.");
  assert.deepEqual(Object.fromEntries(roundFacts(round)).time, "4.0 ms (draft 1.0, verify 2.0)");
});

test("blanks and numbers are shown as what they are", () => {
  assert.deepEqual([" a b ", "\n", "\t", ""].map(visible), ["␣a b␣", "⏎", "⇥", "∅"]);
  assert.deepEqual([null, 1e300, -1e300, 1.234].map((x) => number(x)), ["–", "∞", "−∞", "1.23"]);
  assert.deepEqual([null, 0, 0.00012, 0.5, 0.99999, 1].map(chance), ["–", "0.000", "1.2e-4", "0.500", "> 0.999", "1.000"]);
});

const point = { tau: 0.5, rows: 40, drafted: 30, tokens: [20, 24], accepted: [10, 14], ms_per_token: [2, 2.4], unknown: 3, departures: 0 };

test("a counterfactual says when it is a bound, an estimate, or exact", () => {
  const bound = counterfactual(point, 10);
  assert.deepEqual(Object.fromEntries(bound.facts), {
    "tokens/round": "2.00 to 2.40", tokens: "20 to 24", "rows verified": "40 (4.00 a round)",
    "draft acceptance rate": "33.3 % to 46.7 %", "ms/token": "2.00 to 2.40",
  });
  assert.equal(bound.sure, "bounds: 3 rounds did not run the drafts that would tell");
  assert.equal(counterfactual({ ...point, unknown: 0, departures: 1 }, 10).sure, "an estimate: 1 round would have gone on from elsewhere");
  const exact = counterfactual({ ...point, tau: null, tokens: [20, 20], unknown: 0, ms_per_token: null, drafted: 0 }, 10);
  assert.deepEqual([exact.window, exact.sure], ["all drafts are verified", "exact for this text"]);
  assert.deepEqual(exact.facts.map(([name]) => name), ["tokens/round", "tokens", "rows verified"]);
});

test("the window is speed alone, but with rejection", () => {
  assert.equal(speedOnly("exact"), "Changes the speed, never the text.");
  assert.match(speedOnly("rejection"), /text/);
});

test("a message with a field missing is none of ours", () => {
  assert.equal(isOfRounds(snapshot(1)), true);
  assert.equal(isOfRounds({ kind: "frame", run: 1 }), false);
  assert.equal(isOfRounds({ kind: "begin", run: 1, user: "", command: "" }), false);
  assert.equal(isOfRounds(null), false);
});
