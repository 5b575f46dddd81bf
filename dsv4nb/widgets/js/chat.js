// The chat: a reducer's state, painted at most once per animation frame.

import { attaching } from "./attach.js";
import { chatPage } from "./chat-page.js";
import { focused, say, toggle } from "./dom.js";
import { breakLine } from "./editor.js";
import { exporting } from "./exports.js";
import { copied } from "./files.js";
import { notice } from "./notice.js";
import { pacer } from "./pacing.js";
import { onPress } from "./press.js";
import { listenForCopies } from "./prose-code.js";
import { mathsFrom, takeMaths } from "./prose-maths.js";
import { isFromKernel } from "./protocol.js";
import { speaker } from "./spoken.js";
import {
  asked, begun, called, caughtUp, extended, mark, opened, past, phase, settled, severed, withdrawn,
} from "./transcript.js";
import { turn } from "./turn.js";
import { SILENT, viewOf } from "./view.js";

const MEASURE_MS = 300;
const NEAR_END_PX = 32;
const ALOUD = "dsv4nb.announce"; // kept by the browser, a habit of the person and not of the notebook

const CUT = "The kernel was restarted or is gone. What was said stays here; run the cell again to go on.";

const PHRASES = {
  asked: "Sending…",
  reading: "Reading the prompt…",
  thinking: "Thinking…",
  deciding: "A call waits for your approval.",
  calling: "Calling a tool…",
  answering: "Answering…",
};

function render({ model, el }) {
  let state = opened(model.get("transcript"));
  let isFollowing = true;
  let [lastTop, lastHeight] = [0, 0]; // of the log, when it was last scrolled
  let isNews = false; // turns that were over before this view came are not announced
  let outcome = "";
  let takingBack = "";
  let isCut = false;
  let measuring = 0;
  let measure = "";
  let offers = "";
  const deciding = new Map(); // id of a command -> the call that it decides about

  const page = chatPage(model.get("examples"));
  const turns = [];
  const facts = pacer();
  let isAloud = kept(ALOUD) === "true";
  const view = viewOf({ model, el }, paint, page.alert);
  const { listen, complain, repaint, resync } = view;
  const aloud = speaker(view.announce);

  const orders = view.orders({
    failed(kind, id, error) {
      if (kind === "send" || kind === "edit") giveBack(id);
      if (kind === "rewind") notices.show("");
      if (id === takingBack) outcome = "Not sent.";
      else if (deciding.has(id) && turns.at(-1)?.refused(deciding.get(id), error)) return;
      else if (!attach.failed(id, error)) complain(kind === "send" ? `Not sent: ${error}` : error);
      if (kind === "set_thinking") page.thinking.checked = model.get("thinking");
      repaint();
    },
    silent(kind, id) {
      complain(state.pending?.id === id ? `${SILENT} Stop takes your message back.` : SILENT);
      repaint();
    },
  });

  const attach = attaching({ button: page.attach, list: page.list, chips: page.chips }, orders.give);

  const notices = notice(() => page.input.focus());
  page.alert.before(notices.el);
  const exports_ = exporting(page.exporting, (kind, fields) => acts.give(kind, fields));
  page.head.after(exports_.el);
  page.root.append(view.heard);

  const acts = {
    give(kind, fields) {
      complain("");
      return orders.give(kind, fields);
    },
    edit(entry, text) {
      if (isCut) return CUT;
      if (isBusy()) return "A reply is running: stop it, or wait for its end.";
      const at = state.turns.indexOf(entry);
      if (at < 0) return "This turn is no longer on the branch that is shown.";
      start("edit", { turn: entry.number, text }, text || entry.user, at);
      page.input.focus();
      return "";
    },
    decide(call, text) {
      complain("");
      const id = text === null ? orders.give("deny", { call }) : orders.give("approve", { call, text });
      deciding.set(id, call);
      const waiting = page.log.querySelectorAll('.dsv4-card[data-state="waiting"] .dsv4-row:not([hidden]) button');
      const here = focused(page.root)?.closest(".dsv4-card");
      ([...waiting].find((node) => node.closest(".dsv4-card") !== here) ?? page.input).focus();
    },
    code(number) {
      exports_.ask("code", number, async ({ content }) => {
        notices.show((await copied(content)) ? "Copied: Python that asks this again, with its seed." : content);
      });
    },
    times: exports_.askTimes,
    has: () => ({ idle: !isBusy() && !isCut, kernel: !isCut }),
    rewound() {
      const last = state.turns.at(-1)?.number;
      if (last) notices.show("Went back. What followed is kept as a branch.", "Undo", () => acts.give("switch", { turn: last }));
    },
  };

  function forked({ code, turns: n }) {
    const what = `A new chat begins with ${n === 1 ? "the first turn" : `the first ${n} turns`}. Show it in a cell: ${code}`;
    notices.show(what, "Copy", () => copied(code));
  }

  function sever() {
    if (isCut) return;
    isCut = true;
    const was = state.pending;
    if (was) giveBack(was.id);
    state = severed(state);
    attach.close();
    complain(CUT);
    repaint();
  }

  function isBusy() {
    return phase(state) !== "idle" || (model.get("status") !== "idle" && !isCut);
  }

  function submit(text) {
    if (isBusy() || text.trim() === "") return false;
    if (isCut) {
      complain(CUT);
      return false;
    }
    start("send", { text }, text);
    return true;
  }

  function start(kind, fields, text, at) {
    complain("");
    notices.show("");
    aloud.hush();
    outcome = "";
    state = asked(state, orders.give(kind, fields), text, at);
    isFollowing = true;
    repaint();
  }

  function submitInput() {
    if (submit(page.input.value)) {
      page.input.value = "";
      fit();
    }
    page.input.focus();
  }

  function giveBack(id) {
    const text = state.pending?.id === id && state.pending.at === Infinity ? state.pending.text : "";
    state = withdrawn(state, id);
    orders.forget(id);
    if (text) page.input.value = page.input.value ? `${text}\n${page.input.value}` : text;
    fit();
  }

  function stop() {
    if (!isBusy()) return;
    aloud.hush();
    const pending = state.pending?.id ?? "";
    const run = state.live?.run ?? (pending ? 0 : model.get("run"));
    orders.give("stop", { run, command: state.live?.command || pending });
    if (pending && !page.alert.hidden) {
      complain("");
      giveBack(pending); // the kernel is silent: do not wait for it
      outcome = "Not sent.";
      repaint();
    } else takingBack = pending;
  }

  function fit() {
    page.input.style.height = "auto";
    page.input.style.height = `${page.input.scrollHeight + 2}px`;
    paintButton();
    clearTimeout(measuring);
    measuring = setTimeout(count, MEASURE_MS);
  }

  /** Ask what the message takes of the room; nobody waits for the answer. */
  function count() {
    if (isCut || !("used" in (model.get("room") ?? {}))) return;
    measure = `${Math.random()}`;
    model.send({ kind: "measure", id: measure, text: page.input.value });
  }

  function receive(message) {
    if (!isFromKernel(message)) return;
    if (isCut) complain(""); // it was not gone
    isCut = false;
    if (message.kind === "ack") orders.acknowledged(message);
    else if (message.kind === "names") attach.names(message);
    else if (message.kind === "forked") forked(message);
    else if (message.kind === "measured" && message.id === measure) page.room.show(message.room);
    else if (message.kind === "exported" || message.kind === "times") exports_.came(message);
    else if (message.kind === "begin") state = begun(state, message);
    else if (message.kind === "frame") state = extended(state, message);
    else if (message.kind === "call") state = called(state, message);
    else if (message.kind === "snapshot") state = caughtUp(state, message);
    else if (message.kind === "maths") takeMaths(message.script);
    if (state.lost) resync();
    repaint();
  }

  function settle() {
    const before = state.ended;
    state = settled(state, model.get("transcript"));
    if (state.ended > before && state.turns.length > 0) {
      const last = state.turns.at(-1);
      outcome = last.error ? "Failed." : mark(last) ? `${mark(last)}.` : "Done.";
      if (isAloud && last.stop_reason !== "cancelled") aloud.hear(last.text, true);
    } else outcome = "";
    isNews = true;
    repaint();
  }

  function paint() {
    const isRunning = state.live !== null || state.pending !== null;
    const over = past(state);
    const wanted = over.length + (isRunning ? 1 : 0);
    while (turns.length > wanted) turns.pop().el.remove();
    const offered = `${over.length} ${isBusy()} ${isCut}`;
    over.forEach((entry, i) => {
      const isNew = turns[i]?.shows !== entry;
      if (isNew) {
        turnAt(i).ended(entry, isNews);
        turns[i].shows = entry;
      }
      const isLast = i === wanted - 1;
      const isAt = () => i >= over.length - 2 || turns[i].el.matches(":hover, :focus-within");
      if (isNew || (offered !== offers && isAt())) turns[i].tools(isLast);
    });
    offers = offered;
    if (state.live) {
      const { run, command } = state.live;
      turnAt(wanted - 1, [run, command || run]).running(state.live, facts(state.live));
      turns[wanted - 1].shows = run;
      if (isAloud) aloud.hear(state.live.text, false);
    } else if (state.pending) {
      turnAt(wanted - 1, [state.pending.id]).waiting(state.pending.text);
      turns[wanted - 1].shows = state.pending.id;
    }
    toggle(page.empty, wanted === 0);
    toggle(page.log, wanted > 0);
    page.log.setAttribute("aria-busy", String(isRunning));
    paintControls();
    follow();
  }

  function follow() {
    if (isFollowing) page.log.scrollTop = page.log.scrollHeight;
  }

  /** The turn in place `i`, a blank one if there is none or it shows none of `kept`. */
  function turnAt(i, kept = [turns[i]?.shows]) {
    if (turns[i] && kept.includes(turns[i].shows)) return turns[i];
    const blank = turn(acts);
    if (turns[i]) turns[i].el.replaceWith(blank.el);
    else page.log.append(blank.el);
    turns[i] = blank;
    return blank;
  }

  function paintControls() {
    const at = phase(state);
    const isStopping = model.get("status") === "stopping";
    const isQueued = at === "reading" && model.get("status") === "queued";
    say(page.status, isStopping ? "Stopping…" : isQueued ? "Waiting for the model…" : (PHRASES[at] ?? outcome));
    say(page.title, model.get("title"));
    toggle(page.fresh, state.turns.length > 0 || at !== "idle");
    toggle(page.exporting, state.turns.length > 0);
    if (page.exporting.hidden) exports_.close();
    for (const node of [page.aloud, page.thinking, page.exporting, page.fresh, page.attach]) node.disabled = isCut;
    el.dataset.phase = at;
    el.dataset.status = model.get("status");
    paintButton();
  }

  function paintButton() {
    const isStop = isBusy();
    say(page.button, isStop ? "Stop" : "Send");
    page.button.classList.toggle("is-stop", isStop);
    const isIdle = !isStop && page.input.value.trim() === "";
    if (isIdle && focused(page.root) === page.button) page.input.focus();
    page.button.disabled = isIdle;
  }

  function onThinking() {
    page.thinking.checked = model.get("thinking");
  }

  function onAloud() {
    page.aloud.setAttribute("aria-pressed", String(isAloud));
    if (!isAloud) aloud.hush();
  }

  function onAttached() {
    attach.show(model.get("attached") ?? []);
  }

  function onRoom() {
    page.room.show(model.get("room") ?? {});
    if (page.input.value !== "") count();
  }

  onPress(page.button, listen, ({ detail }) => {
    if (!isBusy()) submitInput();
    else if (detail < 2) stop(); // the second click of a double click on Send is no Stop
  });
  listen(page.input, "input", fit);
  listen(page.input, "keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    if (event.shiftKey) breakLine(page.input, fit);
    else submitInput();
  });
  listen(page.root, "keydown", (event) => {
    if (event.key !== "Escape" || !isBusy()) return;
    event.preventDefault();
    event.stopPropagation();
    stop();
  });
  page.suggestions.forEach((suggestion) => {
    listen(suggestion, "click", () => {
      submit(suggestion.textContent);
      page.input.focus();
    });
  });
  listen(page.fresh, "click", () => {
    complain("");
    orders.give("reset", {});
    page.input.focus();
  });
  listen(page.aloud, "click", () => {
    isAloud = !isAloud;
    keep(ALOUD, String(isAloud));
    onAloud();
  });
  listen(page.thinking, "change", () => orders.give("set_thinking", { value: page.thinking.checked }));
  listen(page.log, "scroll", () => {
    const { scrollTop, scrollHeight, clientHeight } = page.log;
    // only a reader goes up in a text that did not shrink; that the end moved is no reader's doing
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    const isPulled = scrollTop < lastTop && scrollHeight >= lastHeight;
    isFollowing = isAtEnd || (isFollowing && !isPulled);
    [lastTop, lastHeight] = [scrollTop, scrollHeight];
  });
  // what comes into sight has another size than it was thought to have
  for (const grown of ["dsv4-grown", "contentvisibilityautostatechange"]) listen(page.log, grown, follow);

  view.hear({
    "msg:custom": receive,
    "change:transcript": settle,
    "change:status": repaint,
    "change:title": repaint,
    "change:thinking": onThinking,
    "change:attached": onAttached,
    "change:room": onRoom,
  });
  view.whenCut(sever);

  listenForCopies(page.log);
  mathsFrom(() => model.send({ kind: "maths" }));
  view.mount("chat", page.root);
  onThinking();
  onAloud();
  onAttached();
  onRoom();
  paint();
  resync(); // where there is no kernel, the saved transcript is all there is

  return () => {
    view.end();
    aloud.hush();
    clearTimeout(measuring);
  };
}

/** What the browser keeps for this person; a page in a sandbox has no such place. */
function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // as long as this page, then
  }
}

export default { render };
