import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { whyNot } from "../../dsv4nb/widgets/js/card.js";
import { pacer } from "../../dsv4nb/widgets/js/pacing.js";
import {
  asked, begun, called, caughtUp, extended, isWaiting, mark, opened, past, phase, settled, severed, withdrawn,
} from "../../dsv4nb/widgets/js/transcript.js";

const entry = (user, text) => ({ user, text, reasoning: "", cards: [], is_calling: false, stop_reason: "stop", error: "" });
const over = [entry("a", "1"), entry("b", "2"), entry("c", "3")];
const chat = () => opened({ turns: over, ended: 3 });
const texts = (turns) => turns.map((turn) => turn.text);
const card = (state, result = "") => ({ id: "call_0", name: "f", state, status: state, result });
const begin = (run, command = "") => ({ run, user: "q", command });

test("an edited turn and what followed it make way at once, and come back when the edit is refused", () => {
  const state = asked(chat(), "a-1", "other", 1);
  assert.deepEqual(texts(past(state)), ["1"]);
  assert.equal(phase(state), "asked");
  assert.deepEqual(texts(past(withdrawn(state, "a-1"))), ["1", "2", "3"]);
});

test("an edit that began stands behind what is left of the branch", () => {
  const left = settled(asked(chat(), "a-1", "other", 1), { turns: over.slice(0, 1), ended: 3 });
  const state = begun(left, begin(4, "a-1"));
  assert.equal(state.pending, null);
  assert.deepEqual(texts(past(state)), ["1"]);
});

test("a question behind the last turn hides none", () => {
  assert.deepEqual(texts(past(asked(chat(), "a-1", "more"))), ["1", "2", "3"]);
  assert.deepEqual(texts(past(chat())), ["1", "2", "3"]);
});

test("a call that waits for the person is told as that, decided once, and not asked again by an older message", () => {
  let state = called(begun(chat(), begin(4)), { run: 4, index: 0, card: card("running") });
  assert.equal(phase(state), "calling");
  state = called(state, { run: 4, index: 0, card: card("waiting") });
  assert.equal(phase(state), "deciding");
  assert.equal(isWaiting(state.live), false, "the card says that it goes on");
  state = called(state, { run: 4, index: 0, card: card("answered", "21") });
  const snapshot = { run: 4, user: "q", command: "", next: 0, reasoning: "", text: "", n_reasoning: 0, is_calling: false };
  state = caughtUp(state, { ...snapshot, cards: [card("waiting")] });
  assert.equal(state.live.cards[0].state, "answered");
});

test("when the kernel is gone what was said stays, marked, and nothing waits", () => {
  let state = extended(begun(chat(), begin(4)), { run: 4, start: 0, tokens: [["c", "half"]] });
  state = severed(called(state, { run: 4, index: 0, card: card("waiting") }));
  assert.deepEqual(texts(past(state)), ["1", "2", "3", "half"]);
  const last = state.turns.at(-1);
  assert.equal(mark(last), "Not finished: the kernel is gone");
  assert.equal(last.cards[0].state, "unanswered");
  assert.equal(phase(state), "idle");
  assert.equal(phase(severed(asked(chat(), "a-1", "lost"))), "idle");
  assert.deepEqual(texts(past(settled(state, { turns: over, ended: 4 }))), ["1", "2", "3"], "a kernel that was not gone");
});

test("arguments are a JSON object or are refused with the reason", () => {
  assert.equal(whyNot('{"city": "Paris"}'), "");
  assert.match(whyNot('{"city": '), /^This is no JSON: /);
  for (const text of ["[1]", "null", "7", '"a"']) assert.match(whyNot(text), /must be a JSON object/);
});

test("the speed of a reply leaves out the time in which a call waited", () => {
  let now = 1000;
  mock.method(performance, "now", () => now);
  try {
    const facts = pacer();
    const at = (ms, next, ...cards) => {
      now = ms;
      return facts({ run: 1, next, cards });
    };
    assert.equal(at(1000, 0), "");
    assert.equal(at(2000, 40), "40 tokens · 40.0 tok/s");
    assert.equal(at(2100, 40), "", "not with every frame");
    assert.equal(at(3000, 80, card("waiting")), "");
    assert.equal(at(63000, 80, card("answered")), "80 tokens · 40.0 tok/s");
    assert.equal(at(64000, 120, card("answered")), "120 tokens · 40.0 tok/s");
  } finally {
    mock.restoreAll();
  }
});
