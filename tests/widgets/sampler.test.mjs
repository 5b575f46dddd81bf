import assert from "node:assert/strict";
import { test } from "node:test";

import { outbox, PERIOD_MS } from "../../dsv4nb/widgets/js/sampler-outbox.js";
import { last, lines, position, shown, spoken, stepped, strings, typed, valueAt } from "../../dsv4nb/widgets/js/sampler-scale.js";

const even = { name: "temperature", low: 0, high: 2, step: 0.05, stops: [] };
const signed = { name: "frequency_penalty", low: -2, high: 2, step: 0.05, stops: [] };
const stops = { name: "top_k", stops: [0, 1, 2, 5, 10, 50, 1000] };
const open = { name: "max_new", stops: [1, 2, 4, 8, null] };

test("every position of a slider is a value, and every value of it the same position", () => {
  for (const control of [even, signed, stops, open]) {
    for (let at = 0; at <= last(control); at += 1) assert.equal(position(control, valueAt(control, at)), at);
  }
  assert.equal(valueAt(even, 14), 0.7, "no 0.7000000000000001");
  assert.equal(valueAt(signed, 0), -2);
});

test("a value between two positions stands at the nearer one, and beyond the ends at the end", () => {
  assert.equal(position(stops, 40), 5);
  assert.equal(position(even, 0.62), 12);
  assert.equal(position(even, 9), last(even));
  assert.equal(position(signed, -7), 0);
  assert.equal(position(stops, 5000), 6);
});

test("a step goes to the next position, from between two to the one on that side", () => {
  assert.equal(stepped(even, 0.5, 1), 0.55);
  assert.equal(stepped(even, 0.62, -1), 0.6);
  assert.equal(stepped(even, 0.62, 1), 0.65);
  assert.equal(stepped(stops, 40, 1), 50);
  assert.equal(stepped(stops, 40, -1), 10);
  assert.equal(stepped(even, 2, 1), 2);
  assert.equal(stepped(open, null, -1), 8);
  assert.equal(stepped(open, 8, 1), null);
});

test("what is typed is a number, nothing, or text that the engine judges", () => {
  assert.equal(typed(" 0.7 "), 0.7);
  assert.equal(typed("1e-3"), 0.001);
  assert.equal(typed("4 096"), 4096);
  assert.equal(typed(""), null);
  assert.equal(typed("much"), "much");
  assert.equal(typed("1,5"), "1,5");
  assert.equal(shown(null), "");
  assert.equal(shown(0), "0");
});

test("values are spoken", () => {
  assert.equal(spoken(open, null), "all that is left");
  assert.equal(spoken(stops, 0), "off");
  assert.equal(spoken({ name: "penalty_last_n", stops: [0, 16] }, 0), "the whole context");
  assert.equal(spoken(even, 0), "0");
});

test("stop strings survive the field", () => {
  for (const one of [["\n\n"], ["END", "a\tb"], ["\\n"], ["C:\\x"], []]) assert.deepEqual(strings(lines(one)), one);
  assert.deepEqual(strings("a\n\nb"), ["a", "b"]);
});

function clocked() {
  let now = 0;
  let jobs = [];
  const given = [];
  const box = outbox(
    (changes) => {
      given.push(changes);
      return `id${given.length}`;
    },
    { now: () => now, later: (job, ms) => jobs.push([now + ms, job]) },
  );
  const pass = (ms) => {
    now += ms;
    const due = jobs.filter(([at]) => at <= now);
    jobs = jobs.filter(([at]) => at > now);
    due.forEach(([, job]) => job());
  };
  return { box, given, pass };
}

test("a drag asks one command at a time, and the last value always arrives", () => {
  const { box, given, pass } = clocked();
  for (let i = 0; i < 300; i += 1) {
    box.put("temperature", i);
    pass(10);
    if (i % 5 === 4) box.settled(`id${given.length}`, "");
  }
  assert.ok(given.length <= 3000 / PERIOD_MS + 2, `${given.length} commands in 3 s`);
  assert.ok(given.length > 20);
  for (let i = 0; i < 5; i += 1) {
    box.settled(`id${given.length}`, "");
    pass(PERIOD_MS);
  }
  assert.deepEqual(given.at(-1), { temperature: 299 });
  assert.equal(box.open("temperature"), undefined, "what the kernel has is what is shown");
});

test("controls wait for each other and keep their own value", () => {
  const { box, given, pass } = clocked();
  box.put("top_p", 0.9);
  box.put("top_k", 5);
  box.put("top_k", 6);
  assert.deepEqual(given, [{ top_p: 0.9 }]);
  assert.deepEqual(box.open("top_k"), { value: 6 });
  box.settled("id1", "");
  pass(PERIOD_MS);
  assert.deepEqual(given, [{ top_p: 0.9 }, { top_k: 6 }]);
});

test("a refused value stays to be seen until it is changed or let go", () => {
  const { box, pass } = clocked();
  box.put("top_p", 7);
  box.settled("id1", "top_p is 7");
  assert.equal(box.open("top_p").value, 7);
  assert.equal(box.refusal("top_p"), "top_p is 7");
  box.settled("id1", "again"); // a repeated answer
  pass(PERIOD_MS);
  box.put("top_p", 0.5);
  assert.equal(box.refusal("top_p"), "");
  box.settled("id2", "no");
  box.forgive("top_p");
  assert.equal(box.open("top_p"), undefined);
});

test("a refusal of what is already being changed again is not shown", () => {
  const { box } = clocked();
  box.put("top_p", 7);
  box.put("top_p", 0.5);
  box.settled("id1", "top_p is 7");
  assert.equal(box.refusal("top_p"), "");
  assert.deepEqual(box.open("top_p"), { value: 0.5 });
});
