// The requests of a model: rows keep their place in the page while their numbers change.

import { element, focusable, focused, say, toggle } from "./dom.js";
import { doing, ended, number, rate, since, span, summary } from "./queue-words.js";
import { viewOf } from "./view.js";

const CUT = "The kernel was restarted or closed, and its requests with it. Run the cell again to see the queue.";

function render({ model, el }) {
  let isCut = false;
  let lastSaid = "";
  const view = viewOf({ model, el }, paint);
  const { alert, heard, listen, complain, repaint } = view;

  const title = element("strong", { class: "dsv4-title" });
  const status = element("span", { class: "dsv4-state" });
  const empty = element("p", { class: "dsv4-empty" });
  const list = element("ol", { class: "dsv4-bare dsv4-requests", "aria-label": "Requests that have not ended" });
  const more = element("p", { class: "dsv4-more", hidden: true });
  const body = element("tbody");
  const heads = ["request", "outcome", "prompt", "cached", "tokens", "speed", "waited", "ran"];
  const table = element(
    "table",
    { class: "dsv4-table dsv4-past" },
    element("caption", { class: "dsv4-unseen", text: "Requests that have ended, the latest first" }),
    element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col", text })))),
    body,
  );
  const history = element(
    "details",
    { class: "dsv4-history", open: true },
    focusable("summary", { class: "dsv4-unfold", text: "Ended" }),
    focusable("div", { class: "dsv4-wide", tabindex: "0", role: "region", "aria-label": "Requests that have ended" }, table),
  );
  const root = element(
    "div",
    { class: "dsv4-panel", role: "group", "aria-label": "Queue" },
    element("div", { class: "dsv4-head" }, title, status),
    alert, empty, list, more, history, heard,
  );

  /** @type {Map<number, ReturnType<typeof rowOf>>} */
  const rows = new Map();
  const orders = view.orders({
    failed(kind, id, error) {
      for (const one of rows.values()) one.refused(id);
      complain(error);
    },
    silent() {
      complain("The kernel has not answered yet. A restarted kernel can be the reason.");
    },
  });

  function rowOf(id) {
    const place = element("span", { class: "dsv4-place" });
    const word = element("span", { class: "dsv4-word" });
    const about = element("span", { class: "dsv4-about" });
    const facts = element("span", { class: "dsv4-facts" });
    const bar = element("progress", { class: "dsv4-bar", max: "1", value: "0", "aria-label": `Prompt of request ${id}`, hidden: true });
    const cancel = focusable("button", { type: "button", class: "dsv4-quiet", text: "Cancel", "aria-label": `Cancel request ${id}` });
    let asked = "";
    listen(cancel, "click", () => {
      if (asked) return;
      complain("");
      asked = orders.give("cancel", { request: id });
      cancel.setAttribute("aria-disabled", "true"); // a disabled button would lose the focus
      say(cancel, "Cancelling");
    });
    const node = element(
      "li",
      { class: "dsv4-request", "data-id": String(id) },
      place,
      element("div", { class: "dsv4-what" }, element("div", { class: "dsv4-line" }, word, about), facts, bar),
      cancel,
    );
    return {
      node,
      has: () => node.contains(focused(node)),
      refused(command) {
        if (command !== asked) return;
        asked = "";
        cancel.removeAttribute("aria-disabled");
        say(cancel, "Cancel");
      },
      show(one, index) {
        const { word: is, part } = doing(one);
        node.dataset.state = one.state;
        say(place, one.state === "running" ? "▶" : String(index));
        place.title = one.state === "running" ? "running" : `${index} before it`;
        say(word, is);
        say(about, one.about || `request ${one.id}`);
        about.title = one.about;
        const read = part === null || !one.n_read ? "" : `${number(one.n_read)} of `;
        const told = [`#${one.id}`, `${read}${number(one.n_prompt)} prompt tokens`, `${since(one.waited_s)} since it came`];
        if (one.n_tokens) told.push(`${number(one.n_tokens)} tokens`, rate(one));
        say(facts, told.join(" · "));
        toggle(bar, part !== null);
        if (part !== null) bar.value = part;
      },
    };
  }

  function paint() {
    const told = model.get("state");
    const state = isCut ? { ...told, waiting: [], more: 0 } : told;
    say(title, model.get("title"));
    say(status, isCut ? "" : summary(state));
    const ids = new Set(state.waiting.map((one) => one.id));
    let lostFocus = false;
    for (const [id, one] of rows) {
      if (ids.has(id)) continue;
      lostFocus ||= one.has();
      one.node.remove();
      rows.delete(id);
    }
    state.waiting.forEach((one, index) => {
      if (!rows.has(one.id)) rows.set(one.id, rowOf(one.id));
      const mine = rows.get(one.id);
      if (list.children[index] !== mine.node) list.insertBefore(mine.node, list.children[index] ?? null);
      mine.show(one, index);
    });
    toggle(history, state.past.length > 0);
    if (lostFocus) (list.querySelector("button") ?? history.querySelector("summary")).focus();
    toggle(list, state.waiting.length > 0);
    say(more, `and ${number(state.more)} more`);
    toggle(more, state.more > 0);
    const nothing = state.closed
      ? "The model is closed. Nothing waits and nothing can be asked."
      : "No request is waiting or running. Requests of every handle, chat and batch appear here.";
    say(empty, nothing);
    toggle(empty, state.waiting.length === 0 && !isCut);
    paintPast(state.past);
    el.dataset.waiting = String(state.waiting.length + state.more);
    el.dataset.past = String(state.past.length);
    announce(state);
  }

  /** Speak when the queue becomes empty or not, not at every number. */
  function announce(state) {
    const said = state.waiting.length ? "Requests are in the queue." : "The queue is empty.";
    if (lastSaid && said !== lastSaid) view.announce(said);
    lastSaid = said;
  }

  function paintPast(past) {
    const key = past.map((one) => one.id).join(" ");
    if (body.dataset.key === key) return;
    body.dataset.key = key;
    body.replaceChildren(
      ...past.map((one) =>
        element(
          "tr",
          { "data-state": one.state },
          element("th", { scope: "row" }, element("span", { class: "dsv4-id", text: `#${one.id}` }), element("span", { class: "dsv4-about", text: one.about, title: one.about })),
          element("td", {}, element("span", { text: ended(one) }), ...(one.state === "failed" ? [element("span", { class: "dsv4-why", text: one.outcome })] : [])),
          ...[number(one.n_prompt), number(one.n_cached), number(one.n_tokens), rate(one), span(one.queue_s), span(one.run_s)].map((text) => element("td", { text })),
        ),
      ),
    );
  }

  view.whenCut(() => {
    isCut = true;
    orders.end();
    complain(CUT);
    repaint();
  });
  const receive = (message) => {
    if (message?.kind === "ack") orders.acknowledged(message);
  };
  view.hear({ "msg:custom": receive, "change:state": repaint, "change:title": repaint });

  view.mount("queue", root);
  paint();
  return view.end;
}

export default { render };
