// The columns: what is in sight is drawn, whatever the length of the reply.

import { WORDS } from "./rounds-words.js";

export const PITCH = 26; // of a column
const BOX = 18;
const TALL = 15;
const ROW = 19;
const GAP = 14;
const CONF = 54;
const TOKENS = 34;
const MS = 34;
const AXIS = 18;
const PAD = 4;

/** Where the lanes are, from the top. @param {number} slots @param {{ conf: boolean, ms: boolean }} has */
export function lanes(slots, has) {
  let y = PAD;
  const take = (height) => {
    const top = y;
    y += height + GAP;
    return top;
  };
  const at = { slots: take(slots * ROW - (ROW - TALL)) };
  at.conf = has.conf ? take(CONF) : null;
  at.tokens = take(TOKENS);
  at.ms = has.ms ? take(MS) : null;
  at.axis = y - 8;
  at.height = at.axis + AXIS;
  return at;
}

/** Labels for the lanes: [text, y of the middle]. */
export function laneLabels(slots, at) {
  const labels = Array.from({ length: slots }, (_, k) => [`draft ${k + 1}`, at.slots + k * ROW + TALL / 2]);
  if (at.conf !== null) labels.push(["confidence", at.conf + CONF / 2]);
  labels.push(["tokens", at.tokens + TOKENS / 2]);
  if (at.ms !== null) labels.push(["ms", at.ms + MS / 2]);
  labels.push(["round", at.axis + AXIS / 2]);
  return labels;
}

/** Which round and slot is at a place of the whole strip; slot -1 beside the slots. */
export function hit(x, y, rounds, at) {
  const round = Math.floor(x / PITCH);
  if (round < 0 || round >= rounds.length || y < 0 || y > at.height) return null;
  const slot = Math.floor((y - at.slots + (ROW - TALL) / 2) / ROW);
  return { round, slot: slot >= 0 && slot < rounds[round].drafts.length ? slot : -1 };
}

/** The middle of a slot, or of a column, in the whole strip. */
export function middle({ round, slot }, at) {
  return { x: round * PITCH + PITCH / 2, y: slot < 0 ? at.slots : at.slots + slot * ROW + TALL / 2 };
}

/** Size a canvas for the screen and return its context, in CSS pixels. */
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

/** One slot; each status has a shape of its own, so that colour is not needed. */
export function drawSlot(ctx, status, x, y, ink) {
  ctx.lineWidth = 1.25;
  switch (status) {
    case "accepted":
      ctx.fillStyle = ink.accepted;
      box(ctx, x, y, BOX, TALL, 3).fill();
      return;
    case "rejected":
      ctx.fillStyle = ink.rejectedSoft;
      ctx.strokeStyle = ink.rejected;
      box(ctx, x + 0.75, y + 0.75, BOX - 1.5, TALL - 1.5, 3).fill();
      ctx.lineWidth = 1.5;
      ctx.stroke();
      ctx.lineWidth = 2;
      line(ctx, x + 5.5, y + 4, x + BOX - 5.5, y + TALL - 4);
      line(ctx, x + BOX - 5.5, y + 4, x + 5.5, y + TALL - 4);
      return;
    case "unreached":
      ctx.strokeStyle = ink.faint;
      ctx.lineWidth = 1;
      box(ctx, x + 0.5, y + 0.5, BOX - 1, TALL - 1, 3).stroke();
      for (let d = 6; d < BOX + TALL; d += 6) {
        line(ctx, x + Math.max(1, d - TALL), y + Math.min(TALL - 1, d), x + Math.min(BOX - 1, d), y + Math.max(1, d - BOX));
      }
      return;
    case "not_verified":
      ctx.fillStyle = ink.faint;
      ctx.beginPath();
      ctx.arc(x + BOX / 2, y + TALL / 2, 2.25, 0, 2 * Math.PI);
      ctx.fill();
      return;
    case "past_stop":
      ctx.fillStyle = ink.accepted;
      for (const dx of [1, 7.5, 14]) box(ctx, x + dx, y, 3, TALL, 1).fill();
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {{ rounds: import("./rounds.js").Round[], left: number, width: number, at: object, ink: object,
 *           tau: number | null, focus: object | null, hover: object | null, opened: number, slowest: number }} view
 */
export function drawColumns(canvas, view) {
  const { rounds, left, width, at, ink, tau, focus, hover, opened, slowest } = view;
  const ctx = sized(canvas, width, at.height);
  const first = Math.max(0, Math.floor(left / PITCH));
  const last = Math.min(rounds.length - 1, Math.floor((left + width) / PITCH));
  const inset = (PITCH - BOX) / 2;

  rules(ctx, at, Math.min(width, rounds.length * PITCH - left), ink, tau);
  for (let i = first; i <= last; i += 1) {
    const round = rounds[i];
    const x = i * PITCH - left;
    if (i === opened || i === hover?.round) {
      ctx.fillStyle = i === opened ? ink.opened : ink.hover;
      ctx.fillRect(x, 0, PITCH, at.height);
    }
    if (i > 0 && rounds[i - 1].reply !== round.reply) {
      ctx.strokeStyle = ink.ink;
      ctx.lineWidth = 1;
      line(ctx, x + 0.5, 0, x + 0.5, at.height);
    }
    round.drafts.forEach((draft, k) => drawSlot(ctx, draft.status, x + inset, at.slots + k * ROW, ink));
    if (at.conf !== null) confidence(ctx, round, x, at.conf, ink);
    tokens(ctx, round, x + inset, at.tokens, ink);
    if (at.ms !== null) times(ctx, round, x + inset, at.ms, slowest, ink);
    if (round.round % 5 === 0) {
      ctx.fillStyle = ink.soft;
      ctx.font = ink.font;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillText(String(round.round), x + PITCH / 2, at.axis + AXIS / 2);
    }
  }
  if (tau !== null && at.conf !== null) tauRule(ctx, at, Math.min(width, rounds.length * PITCH - left), ink, tau);
  if (focus !== null) ring(ctx, focus, rounds, left, at, ink);
}

function rules(ctx, at, width, ink) {
  ctx.strokeStyle = ink.line;
  ctx.lineWidth = 1;
  const ends = [at.tokens + TOKENS + 0.5];
  if (at.conf !== null) ends.push(at.conf + 0.5, at.conf + CONF + 0.5);
  if (at.ms !== null) ends.push(at.ms + MS + 0.5);
  for (const y of ends) line(ctx, 0, y, Math.max(0, width), y);
}

function tauRule(ctx, at, width, ink, tau) {
  const y = at.conf + CONF * (1 - tau);
  ctx.strokeStyle = ink.tau;
  ctx.lineWidth = 1.5;
  ctx.setLineDash([5, 3]);
  line(ctx, 0, y, Math.max(0, width), y);
  ctx.setLineDash([]);
}

/** A point per draft, from left to right; hollow where the draft was not accepted. */
function confidence(ctx, round, x, top, ink) {
  const n = round.drafts.length;
  const place = (draft, k) => [x + 4 + (n > 1 ? (k * (PITCH - 8)) / (n - 1) : (PITCH - 8) / 2), top + CONF * (1 - draft.conf)];
  ctx.strokeStyle = ink.soft;
  ctx.lineWidth = 1;
  ctx.beginPath();
  let isOn = false;
  round.drafts.forEach((draft, k) => {
    if (draft.conf === null) isOn = false;
    else ctx[isOn ? "lineTo" : "moveTo"](...place(draft, k)), (isOn = true);
  });
  ctx.stroke();
  round.drafts.forEach((draft, k) => {
    if (draft.conf === null) return;
    const isHollow = draft.status !== "accepted" && draft.status !== "past_stop";
    ctx.beginPath();
    ctx.arc(...place(draft, k), 2.1, 0, 2 * Math.PI);
    ctx.fillStyle = isHollow ? ink.paper : ink.accepted;
    ctx.strokeStyle = draft.status === "rejected" ? ink.rejected : isHollow ? ink.faint : ink.accepted;
    ctx.lineWidth = 1.25;
    ctx.fill();
    ctx.stroke();
  });
}

function tokens(ctx, round, x, top, ink) {
  const most = Math.max(6, round.drafts.length + 1);
  const tall = (TOKENS - 11) * Math.min(1, round.emitted / most);
  ctx.fillStyle = ink.bar;
  ctx.fillRect(x + 2, top + TOKENS - tall, BOX - 4, tall);
  ctx.fillStyle = ink.soft;
  ctx.font = ink.font;
  ctx.textAlign = "center";
  ctx.textBaseline = "alphabetic";
  ctx.fillText(String(round.emitted), x + BOX / 2, top + TOKENS - tall - 2);
}

/** Draft below, then verify, then the rest. */
function times(ctx, round, x, top, slowest, ink) {
  const [draft, verify, , total] = round.ms;
  if (total === null) return;
  const scale = MS / slowest;
  let y = top + MS;
  const whole = Math.min(total, slowest);
  const parts = [[draft ?? 0, ink.draft], [verify ?? 0, ink.verify], [Infinity, ink.faint]];
  let left = whole;
  for (const [ms, style] of parts) {
    const part = Math.min(ms, left);
    left -= part;
    ctx.fillStyle = style;
    ctx.fillRect(x + 2, y - part * scale, BOX - 4, part * scale);
    y -= part * scale;
  }
}

function ring(ctx, focus, rounds, left, at, ink) {
  const x = focus.round * PITCH - left;
  ctx.strokeStyle = ink.focus;
  ctx.lineWidth = 2;
  if (focus.slot < 0) box(ctx, x + 1, 1, PITCH - 2, at.height - 2, 4).stroke();
  else box(ctx, x + 2, at.slots + focus.slot * ROW - 2, PITCH - 4, TALL + 4, 4).stroke();
}

/** The whole reply in one strip: accepted drafts of each pixel's rounds, and what is in sight. */
export function drawOverview(canvas, { rounds, width, left, inSight, ink, slots }) {
  const height = 30;
  const ctx = sized(canvas, width, height);
  const columns = Math.max(1, Math.min(rounds.length, Math.floor(width / 2)));
  const wide = width / columns;
  for (let i = 0; i < columns; i += 1) {
    const from = Math.floor((i * rounds.length) / columns);
    const to = Math.max(from + 1, Math.floor(((i + 1) * rounds.length) / columns));
    let accepted = 0;
    for (let j = from; j < to; j += 1) accepted += rounds[j].accepts;
    const tall = ((height - 4) * accepted) / (to - from) / slots;
    ctx.fillStyle = ink.accepted;
    ctx.fillRect(i * wide, height - 2 - tall, Math.max(1, wide - 0.6), tall);
    ctx.fillStyle = ink.line;
    ctx.fillRect(i * wide, height - 2, wide, 1);
  }
  const all = rounds.length * PITCH;
  ctx.strokeStyle = ink.focus;
  ctx.lineWidth = 1.5;
  const x = (left / all) * width;
  box(ctx, x + 0.75, 0.75, Math.max(6, (Math.min(inSight, all) / all) * width - 1.5), height - 1.5, 3).stroke();
}

/** A picture for the legend. */
export function legendKey(status, ink) {
  const canvas = document.createElement("canvas");
  canvas.className = "dsv4-key";
  canvas.setAttribute("aria-hidden", "true");
  drawSlot(sized(canvas, BOX, TALL), status, 0, 0, ink);
  return canvas;
}

export const STATUSES = Object.keys(WORDS);

function box(ctx, x, y, w, h, r) {
  ctx.beginPath();
  ctx.roundRect(x, y, w, h, r);
  return ctx;
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}
