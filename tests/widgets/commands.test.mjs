import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { commands } from "../../dsv4nb/widgets/js/commands.js";

function setUp() {
  mock.timers.enable({ apis: ["setTimeout"] });
  const sent = [], failed = [], silent = [];
  const orders = commands((message) => sent.push(message), {
    failed: (...told) => failed.push(told),
    silent: (...told) => silent.push(told),
  });
  return { orders, sent, failed, silent };
}

test("an unanswered command is repeated once with its id, then told to be silent", () => {
  const { orders, sent, failed, silent } = setUp();
  const id = orders.give("send", { text: "a" });
  mock.timers.tick(60_000);
  assert.deepEqual(sent, [{ kind: "send", id, text: "a" }, { kind: "send", id, text: "a" }]);
  assert.deepEqual([failed, silent], [[], [["send", id]]]);
  mock.timers.reset();
});

test("an answered command is not repeated", () => {
  const { orders, sent, failed, silent } = setUp();
  orders.acknowledged({ id: orders.give("stop", {}), ok: true, error: "", trace: "" });
  mock.timers.tick(60_000);
  assert.deepEqual([sent.length, failed.length, silent.length], [1, 0, 0]);
  mock.timers.reset();
});

test("a refusal is told once, also when its answer comes twice, and another view's not at all", () => {
  const { orders, failed } = setUp();
  const id = orders.give("send", { text: "a" });
  for (const told of [id, id, "another"]) orders.acknowledged({ id: told, ok: false, error: "busy", trace: "" });
  assert.deepEqual(failed, [["send", id, "busy", ""]]);
  mock.timers.reset();
});

test("ids differ, and after the end nothing is sent", () => {
  const { orders, sent } = setUp();
  assert.notEqual(orders.give("reset", {}), orders.give("reset", {}));
  orders.end();
  mock.timers.tick(60_000);
  assert.equal(sent.length, 2);
  mock.timers.reset();
});

test("without a kernel a command fails at once, after its caller knows its id", async () => {
  const failed = [];
  const orders = commands(() => { throw new Error("comm is closed"); }, {
    failed: (...told) => failed.push(told),
    silent: () => assert.fail("it was told already"),
  });
  const id = orders.give("send", { text: "a" });
  assert.deepEqual(failed, []);
  await Promise.resolve();
  assert.equal(failed.length, 1);
  assert.deepEqual(failed[0].slice(0, 2), ["send", id]);
});
