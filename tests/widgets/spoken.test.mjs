import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { nextSentence, speaker } from "../../dsv4nb/widgets/js/spoken.js";

function sentences(text, isOver = true) {
  const found = [];
  for (let at = 0, next; (next = nextSentence(text, at, isOver)); at = next.to) found.push(next.said);
  return found;
}

test("a reply is cut into sentences, without its marks", () => {
  const text = "# Paris\n\nIt is *the* **capital**, and 2 * 3 of `snake_case` or _two_. Pi is 3.14 (about). \"Really?\" Yes!\n\n- see [here](http://x.y)\n1. one\n2. two";
  assert.deepEqual(sentences(text), [
    "Paris", "It is the capital, and 2 * 3 of snake_case or two.", "Pi is 3.14 (about).", '"Really?"', "Yes!", "see here", "1. one", "2. two",
  ]);
});

test("code is named and not read, and an open block is waited for", () => {
  const text = "Run it:\n\n```python\nprint('a. b. ')\n```\nDone.";
  assert.deepEqual(sentences(text), ["Run it:", "A block of code.", "Done."]);
  assert.deepEqual(sentences("Run it:\n\n```python\nprint(1)\n", false), ["Run it:"]);
  assert.deepEqual(sentences("```\nprint(1)"), ["A block of code."]);
});

test("a sentence is said when it is complete, whatever the pieces it comes in", () => {
  const text = "One two. Three\nfour! Five. 1. Six\n```\nx.\n```\nSeven";
  const whole = sentences(text);
  let at = 0;
  const said = [];
  for (let end = 1; end <= text.length; end += 1) {
    let next;
    while ((next = nextSentence(text.slice(0, end), at, end === text.length))) [at] = [next.to, said.push(next.said)];
  }
  assert.deepEqual(said, whole);
});

test("sentences wait for each other, and another reply begins anew", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const said = [];
  const aloud = speaker((text) => said.push(text));
  aloud.hear("One. Two. Th", false);
  assert.deepEqual(said, ["One."]);
  mock.timers.tick(599);
  assert.deepEqual(said, ["One."]);
  mock.timers.tick(1);
  assert.deepEqual(said, ["One.", "Two."]);
  mock.timers.tick(10_000);
  aloud.hear("One. Two. Three", true);
  assert.deepEqual(said, ["One.", "Two.", "Three"]);
  aloud.hear("Another. ", false);
  assert.deepEqual(said, ["One.", "Two.", "Three", "", "Another."]);
  aloud.hush();
  mock.timers.tick(10_000);
  assert.deepEqual(said.slice(5), [""]);
  mock.timers.reset();
});
