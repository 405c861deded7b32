// The answers of a group: their tokens are fetched when they come into view.
import { fill, paint } from "./tokens.js";

let chosen = "logprob";     // stays while the step is changed
const colour = () => chosen;

async function load(sample, first) {
  const response = await fetch(sample.dataset.tokens, { headers: { accept: "application/json" } });
  const place = sample.querySelector(".tokens");
  if (!response.ok) { place.textContent = "dropped meanwhile"; return; }
  const told = await response.json();
  fill(place, told.answer.map((text, i) => ({
    text, id: told.ids[i], logprob: told.logprobs?.[i], trainer: told.trainer?.[i], top: told.top?.[i],
    advantage: told.advantages ? told.advantages[i] : told.advantage,
  })), colour(), told.prompt.slice(-20).join(""));
  if (first) fill(document.getElementById("prompt"), told.prompt.map((text) => ({ text })), "");
}

// What the colours mean.
const scales = () => document.querySelectorAll(".scale").forEach((one) => { one.hidden = ("signed" in one.dataset) !== (chosen !== "logprob"); });

function begin() {
  const samples = [...document.querySelectorAll("[data-tokens]")];
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) { seen.unobserve(target); load(target, target === samples[0]); }
  });
  samples.forEach((sample) => seen.observe(sample));
  const select = document.getElementById("colour");
  select.value = chosen;
  select.addEventListener("change", () => {
    chosen = select.value;
    document.querySelectorAll(".sample .tokens span").forEach((one) => paint(one, chosen));
    scales();
  });
  scales();
}

document.addEventListener("htmx:afterSwap", begin);
begin();
