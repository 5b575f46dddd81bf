// How fast a reply comes, told a few times a second.

import { isOpen, pace } from "./transcript.js";

const FACTS_MS = 250;

/** @returns {(live: import("./transcript.js").Live) => string} the facts of a running turn, "" leaves them as they are */
export function pacer() {
  let told = -Infinity;
  let before = 0;
  let wasOpen = false; // a function ran, or a call waited for the person, when this was asked before
  let clock = { run: 0, start: 0, first: 0 };

  return (live) => {
    const now = performance.now();
    if (clock.run !== live.run) clock = { run: live.run, start: now, first: live.next };
    else if (wasOpen) clock.start += now - before;
    before = now;
    wasOpen = live.cards.some(isOpen);
    if (wasOpen || now - told < FACTS_MS) return "";
    told = now;
    const seconds = (now - clock.start) / 1000;
    const pacing = live.next - clock.first;
    // the speed is that of what this view saw arrive; a view that comes late has seen little of the run
    if (seconds < 0.5 || pacing < 2) return pace(live.next, 0);
    return `${pace(live.next, 0)} · ${(pacing / seconds).toFixed(1)} tok/s`;
  };
}
