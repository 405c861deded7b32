// The playground: one prompt to several models at once.
import { element } from "./live.js";
import { span } from "./tokens.js";

const form = document.getElementById("ask"), answers = document.getElementById("answers"), ended = document.getElementById("told");
const token = document.body.dataset.formToken, root = document.body.dataset.root;
let stopping = null;

const number = (name) => form.elements[name].value === "" ? null : Number(form.elements[name].value);
const models = () => [...new Set([...form.querySelectorAll("[name=model]")].map((one) => one.value.trim()).filter(Boolean))];
// A checkpoint's run and its name, which tell more than the beginning of its path.
const named = (model) => [...document.querySelectorAll("#known option")].find((one) => one.value === model)?.label || model;
const asked = (model) => ({
  model, mode: form.elements.mode.value, system: form.elements.system.value, prompt: form.elements.prompt.value,
  max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), seed: number("seed"),
});
const post = (path, body, signal) => fetch(`${root}/console/playground/${path}`, {
  method: "POST", headers: { "content-type": "application/json", accept: "application/json, text/event-stream", "x-form-token": token }, body: JSON.stringify(body), signal,
});

async function problem(response) {
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  return page.body.textContent.trim() || `the server answered ${response.status}`;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const name = /^event: (.*)$/m.exec(block)?.[1], data = /^data: (.*)$/m.exec(block)?.[1];
      if (name && data) yield [name, JSON.parse(data)];
    }
  }
}

async function sample(model, signal) {
  const card = element("article", "card"), title = element("h2", "", named(model)), place = element("pre", "tokens"), said = element("p", "faint", "…");
  title.title = model;
  card.append(title, place, said);
  answers.append(card);
  const began = performance.now();
  let count = 0;
  try {
    const response = await post("sample", asked(model), signal);
    if (!response.ok) throw new Error(await problem(response));
    for await (const [name, told] of events(response)) {
      if (name === "tokens") {
        told.pieces.forEach((text, i) => place.append(span({ text, id: told.ids[i], logprob: told.logprobs[i] }, "logprob")));
        count += told.ids.length;
        said.textContent = `${count} tokens, ${(count / ((performance.now() - began) / 1000)).toFixed(1)} per second`;
      } else if (name === "waits") said.textContent = told.why;
      else if (name === "end") {
        [...place.children].forEach((one, i) => { one.token.top = told.top[i]; });
        said.textContent += `, ended by ${told.stop}`;
      } else if (name === "failed") throw new Error(told.error);
    }
  } catch (error) {
    said.className = "problem";
    said.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  ended.textContent += `${title.textContent}: ${said.textContent}. `;   // for screen readers
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  stopping?.abort();
  stopping = new AbortController();
  answers.replaceChildren();
  ended.textContent = "";
  document.getElementById("scale").hidden = false;
  await Promise.all(models().map((model) => sample(model, stopping.signal)));
});
document.getElementById("stop").addEventListener("click", () => stopping?.abort());

document.getElementById("show-tokens").addEventListener("click", async () => {
  const section = document.getElementById("as-tokens"), place = section.querySelector("pre");
  section.hidden = false;
  const response = await post("tokens", asked(models()[0] ?? ""));
  if (!response.ok) { place.textContent = await problem(response); return; }
  const told = await response.json();
  place.replaceChildren(...told.pieces.map((text, i) => Object.assign(span({ text, id: told.ids[i] }, ""), { className: `band-${i % 2}` })));
});

const codes = {
  python: () => {
    const one = asked(models()[0] ?? ""), path = one.model.startsWith("tinker://") ? "model_path" : "base_model", q = JSON.stringify;
    const prompt = one.mode === "text" ? `tokenizer.encode(${q(one.prompt)})`
      : `tinkex.render_chat(tokenizer, [${one.system ? `{"role": "system", "content": ${q(one.system)}}, ` : ""}{"role": "user", "content": ${q(one.prompt)}}])`;
    return `import tinkex\n\nservice = tinkex.ServiceClient(base_url=${q(form.dataset.url)})\nsampler = service.create_sampling_client(${path}=${q(one.model)})\ntokenizer = sampler.get_tokenizer()\nprompt = tinkex.ModelInput.from_ints(${prompt})\nparams = tinkex.SamplingParams(max_tokens=${one.max_tokens}, temperature=${one.temperature}, top_p=${one.top_p}, top_k=${one.top_k}, seed=${one.seed ?? "None"})\nanswer = sampler.sample(prompt, 1, params).result().sequences[0]\nprint(tokenizer.decode(answer.tokens))\n`;
  },
  curl: () => {
    const one = asked(models()[0] ?? ""), chat = one.mode === "chat";
    const messages = [...(one.system ? [{ role: "system", content: one.system }] : []), { role: "user", content: one.prompt }];
    const body = { model: one.model, ...(chat ? { messages } : { prompt: one.prompt }), max_tokens: one.max_tokens, temperature: one.temperature, top_p: one.top_p, top_k: one.top_k, ...(one.seed == null ? {} : { seed: one.seed }) };
    return `curl ${form.dataset.url}/v1/${chat ? "chat/" : ""}completions \\\n  -H "Authorization: Bearer $TINKER_API_KEY" -H "Content-Type: application/json" \\\n  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'\n`;
  },
};
for (const button of document.querySelectorAll("[data-code]")) button.addEventListener("click", async () => {
  if (!form.reportValidity()) return;
  const code = document.getElementById("code"), text = codes[button.dataset.code]();
  code.hidden = false;
  code.open = true;
  code.querySelector("pre").textContent = text;
  try { await navigator.clipboard.writeText(text); } catch { /* it is shown below, to be copied by hand */ }
});

const tell = () => form.querySelectorAll("[name=model]").forEach((one) => {
  const model = one.value.trim(), name = named(model);
  one.title = model;
  one.nextElementSibling.textContent = name === model ? "" : name;
});
form.addEventListener("input", tell);
tell();
