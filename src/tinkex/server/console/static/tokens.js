// Tokens as spans, coloured by a number each; the pointer or the arrow keys show what is known of one.
// All text goes in as text.
import { element } from "./live.js";

const FOLDED = [
  ["<think>", "</think>", "thinking"], ["[THINK]", "[/THINK]", "thinking"], ["<|channel|>analysis", "<|end|>", "thinking"],
  ["<tool_call>", "</tool_call>", "tool call"], ["<|channel|>commentary to=", "<|call|>", "tool call"], ["<|python_tag|>", "<|eom_id|>", "tool call"],
];

// 0 (as expected) to 9 (a surprise): nine steps of a logprob from 0 to about -7.
export const surprise = (logprob) => logprob == null ? "" : `p${Math.min(9, Math.floor(Math.sqrt(Math.max(0, -logprob)) * 3.4))}`;
export const signed = (value, scale) => value == null ? "" : `${value < 0 ? "n" : "g"}${Math.min(4, Math.round(Math.abs(value) / scale * 4))}`;

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\ufeff]/g;   // a pointer finds no place on these
const shown = (v) => v.toFixed(4);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const tip = element("div", "tip"), said = Object.assign(element("div", "unseen"), { role: "status" });   // said: for screen readers
let pointed = null;
document.body.append(said);

// In two lines above the token, so that no answer that comes next is hidden.
function explain(span) {
  const { text, id, logprob, trainer, advantage, top } = span.token;
  const parts = [JSON.stringify(text)];
  if (id != null) parts.push(`id ${id}`);
  if (logprob != null) parts.push(`logprob ${shown(logprob)} (${percent(logprob)})`);
  if (trainer != null) parts.push(`trainer ${shown(trainer)}`, `difference ${shown(logprob - trainer)}`);
  if (advantage != null) parts.push(`advantage ${shown(advantage)}`);
  const likely = (top ?? []).map(([other, its]) => `${JSON.stringify(other)} ${percent(its)}`);
  tip.textContent = parts.join(" · ") + (likely.length ? `\nlikely: ${likely.join(" · ")}` : "");
  document.body.append(tip);
  const box = span.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.top < tip.offsetHeight + 8 ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
}

function point(span) {
  pointed = span;
  if (span) explain(span); else tip.remove();
}

document.addEventListener("pointerover", (event) => point(event.target.token ? event.target : null));
document.addEventListener("scroll", () => { if (pointed) explain(pointed); }, true);
document.addEventListener("focusin", () => point(null));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") point(null);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], place = event.target;
  if (!step || !place.matches(".tokens")) return;
  const all = [...place.querySelectorAll("span")].filter((one) => one.getClientRects().length);   // none of those that are folded
  const next = all[all.includes(pointed) ? all.indexOf(pointed) + step : step > 0 ? 0 : all.length - 1];
  if (!next) return;
  event.preventDefault();
  next.scrollIntoView({ block: "nearest" });
  point(next);
  said.textContent = tip.textContent;
});

export function span(token, kind) {
  const one = element("span", "", token.text.replace(UNSEEN, "·") || "·");
  one.token = token;
  paint(one, kind);
  return one;
}

export function paint(one, kind) {
  const { logprob, trainer, advantage } = one.token;
  one.className = kind === "difference" ? signed(trainer == null ? null : logprob - trainer, 0.2)
    : kind === "advantage" ? signed(advantage, 1) : surprise(logprob);
}

// Puts tokens into an element; what a model thought and the tools it called are folded.
// `before` is the text before the tokens: chat templates may open a thought.
export function fill(place, tokens, kind, before = "") {
  place.replaceChildren();
  let into = place, until = "", text = "";
  const fold = ([, end, name]) => {
    const folded = element("details");
    folded.append(element("summary", "", name));
    place.append(folded);
    [into, until] = [folded, end];
  };
  const opened = FOLDED.find(([begin]) => before.trimEnd().endsWith(begin));
  if (opened) fold(opened);
  for (const token of tokens) {
    text = (text + token.text).slice(-60 - token.text.length);
    const completes = (mark) => text.lastIndexOf(mark) > text.length - token.text.length - mark.length && text.includes(mark);
    const opens = into === place && FOLDED.find(([begin]) => completes(begin));
    if (opens) fold(opens);
    into.append(span(token, kind));
    if (into !== place && !opens && completes(until)) into = place;
  }
}
