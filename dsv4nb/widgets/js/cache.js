// The caches of a model: tabs over facts that the kernel keeps up to date, and over what is pulled when it is looked at.

import { decisions, memory, snapshots } from "./cache-tables.js";
import { expertMap } from "./cache-experts.js";
import { ledgerMap } from "./cache-ledger.js";
import { readsView } from "./cache-reads.js";
import { expertsOf, readsOf, texts } from "./cache-store.js";
import { count } from "./cache-words.js";
import { element, focusable, say, toggle } from "./dom.js";
import { viewOf } from "./view.js";

const CUT = "The kernel was restarted or closed. What it last told stays; run the cell again to ask for more.";
const TABS = [
  ["ledger", "Ledger"], ["log", "Decisions"], ["stores", "Snapshots"], ["memory", "Memory"],
  ["reads", "Attention"], ["experts", "Experts"],
];
const PULLED = ["reads", "experts"];

function render({ model, el }) {
  let tab = "ledger";
  let isCut = false;
  let waiting = "";
  let asked = { reads: "", experts: "" };
  const name = `dsv4-cache-${Math.random().toString(36).slice(2, 10)}`;
  const view = viewOf({ model, el }, paint);
  const { alert, heard, listen, complain, announce, repaint } = view;

  const title = element("strong", { class: "dsv4-title" });
  const strips = focusable("select", { class: "dsv4-select", "aria-label": "Whose tokens" });
  const status = element("span", { class: "dsv4-state" });
  const empty = element("p", { class: "dsv4-empty" });

  const orders = view.orders({
    failed(kind, id, error) {
      if (asked[kind] === id) asked[kind] = "";
      if (kind === "text") pieces.lost();
      wait();
      complain(error);
    },
    silent(kind) {
      if (PULLED.includes(kind)) say(status, "Waiting for the engine: it runs a request first.");
      else complain("The kernel has not answered yet. A running request or a restarted kernel can be the reason.");
    },
  });
  const give = (kind, fields) => {
    if (isCut) {
      complain(CUT);
      return "";
    }
    return orders.give(kind, fields);
  };
  const ledgerOf = () => model.get("state").ledger;
  const pull = (kind, fields) => {
    if (asked[kind]) orders.forget(asked[kind]);
    complain("");
    asked[kind] = give(kind, { key: ledgerOf().key, ...fields });
    wait();
  };
  const pieces = texts((first, last) => give("text", { key: ledgerOf().key, first, last }));

  const views = {
    ledger: ledgerMap({ listen, texts: pieces, announce, onLook: look }),
    log: decisions(),
    stores: snapshots({
      onOrder(kind, fields) {
        complain("");
        give(kind, fields);
      },
      onShow(key) {
        give("choose", { key });
        open("ledger");
      },
    }),
    memory: memory(),
    reads: readsView({ listen, texts: pieces, announce, name, onAsk: (token, layer) => pull("reads", { token, layer }) }),
    experts: expertMap({ listen, announce, name, onAsk: (first, last) => pull("experts", { first, last }) }),
  };
  const heads = TABS.map(([key, text]) =>
    focusable("button", { type: "button", role: "tab", class: "dsv4-tab", id: `${name}-tab-${key}`, "aria-controls": `${name}-${key}`, text, "data-tab": key }),
  );
  const bodies = TABS.map(([key]) =>
    element("section", { role: "tabpanel", class: "dsv4-page", id: `${name}-${key}`, "aria-labelledby": `${name}-tab-${key}` }, views[key].el),
  );
  const root = element(
    "div", { class: "dsv4-panel", role: "group", "aria-label": "Caches" },
    element("div", { class: "dsv4-head" }, title, strips, status),
    alert, element("div", { class: "dsv4-tabs", role: "tablist", "aria-label": "Caches" }, ...heads), empty, ...bodies, heard,
  );

  function wait() {
    waiting = PULLED.some((kind) => asked[kind]) ? "asking the engine…" : "";
    repaint();
  }

  /** Show what a token read. */
  function look(token) {
    open("reads");
    views.reads.look(token);
    heads.find((node) => node.dataset.tab === "reads").focus();
  }

  function open(key) {
    tab = key;
    view.paintNow();
  }

  function receive(message, buffers) {
    if (message.kind === "ack") {
      orders.acknowledged(message);
      return;
    }
    if (message.key !== ledgerOf()?.key) return;
    if (message.kind === "text" && pieces.received(message)) {
      views.reads.write();
      views.ledger.repaint();
    } else if (message.kind === "reads" || message.kind === "experts") {
      if (asked[message.kind] === message.id) asked[message.kind] = "";
      if (message.kind === "reads") views.reads.answered(readsOf(message, buffers));
      else views.experts.answered(expertsOf(message, buffers));
      wait();
    }
  }

  function paint() {
    const state = model.get("state");
    const { ledger } = state;
    const has = Boolean(ledger?.n);
    say(title, model.get("title"));
    paintStrips(state);
    say(status, waiting || [state.model, state.busy ? "a turn is running" : "", has ? count(ledger.n, "token") : ""].filter(Boolean).join(" · "));
    if (has) pieces.turn(ledger.key, ledger.n);
    heads.forEach((node, i) => {
      const isOpen = node.dataset.tab === tab;
      node.setAttribute("aria-selected", String(isOpen));
      node.tabIndex = isOpen ? 0 : -1;
      bodies[i].hidden = !isOpen;
    });
    const needsTokens = ["ledger", "reads", "experts"].includes(tab);
    const needsModel = PULLED.includes(tab) && state.layers.length === 0;
    const nothing = needsModel ? "This engine has no places to look inside." : "Nothing is committed yet. The tokens of a chat appear here after its first turn.";
    toggle(empty, (needsTokens && !has) || needsModel);
    say(empty, nothing);
    if (!empty.hidden) bodies.forEach((node) => (node.hidden = true));
    paintTab(state, has && !needsModel);
    el.dataset.tab = tab;
    el.dataset.key = ledger?.key ?? "";
  }

  function paintTab(state, isThere) {
    const { ledger, layers } = state;
    if (tab === "ledger") views.ledger.show(ledger);
    else if (PULLED.includes(tab)) {
      if (!isThere) return;
      const key = `${tab} ${ledger.key}`;
      views[tab].show(ledger, layers);
      if (opened[tab] === key) return;
      opened[tab] = key;
      if (!isCut) views[tab].open(views.reads.token);
    } else views[tab].show(state);
  }
  const opened = {};

  let shownStrips = "";
  function paintStrips({ strips: told, ledger }) {
    toggle(strips, told.length > 1);
    const known = JSON.stringify(told);
    if (known !== shownStrips) {
      shownStrips = known;
      strips.replaceChildren(...told.map(([key, label, n]) => element("option", { value: key, text: `${label}, ${count(n, "token")}` })));
    }
    if (ledger) strips.value = ledger.key;
  }

  listen(strips, "change", () => {
    complain("");
    give("choose", { key: strips.value });
  });
  const tablist = heads[0].parentElement;
  listen(tablist, "click", (event) => {
    const key = event.target.closest?.("[role=tab]")?.dataset.tab;
    if (!key) return;
    complain("");
    if (key === "experts") delete opened.experts; // the token may be another by now
    open(key);
  });
  listen(tablist, "keydown", (event) => {
    const i = TABS.findIndex(([key]) => key === tab);
    const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to === undefined) return;
    const node = heads[(to + TABS.length) % TABS.length];
    node.click();
    node.focus();
    event.preventDefault();
    event.stopPropagation();
  });
  const recolour = view.onTheme(() => [views.ledger, views.experts].forEach((one) => one.recolour()));
  view.whenCut(() => {
    isCut = true;
    complain(CUT);
  });
  view.hear({ "msg:custom": receive, "change:state": repaint, "change:title": repaint });

  view.mount("cache", root);
  paint();
  recolour();

  return () => {
    view.end();
    for (const one of Object.values(views)) one.end?.();
  };
}

export default { render };
