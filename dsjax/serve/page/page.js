// The page: a conversation on one side, the server's state on the other.

import { ask, messageOf, requestBody } from "/page/answer.js";
import { Watch } from "/page/watch.js";

const $ = (id) => document.getElementById(id);
const KNOBS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

let turns = []; // [{role, text}]
let running = null; // the AbortController of the answer that is being made

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function notice(text) {
  $("notice").hidden = !text;
  if ($("notice").textContent !== (text ?? "")) $("notice").textContent = text ?? "";
}

function element(name, className, text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

function addTurn(role, text) {
  const article = element("article", `turn ${role}`);
  const parts = { article, text: element("div", "text", text), footer: element("footer", "") };
  article.append(element("h3", "", role), parts.text, parts.footer);
  $("turns").append(article);
  article.scrollIntoView({ block: "nearest" });
  return parts;
}

function addReasoning(parts) {
  const details = element("details", "");
  details.open = true; // read while it comes; the answer's first text closes it
  parts.details = details;
  parts.reasoning = element("div", "reasoning");
  parts.summary = element("summary", "", "Reasoning …");
  details.append(parts.summary, parts.reasoning);
  parts.article.insertBefore(details, parts.text);
}

// What stands between fences becomes blocks of code, also while it comes; what stands between backticks, code in its line. Text nodes
// only: nothing that a model says is read as HTML.
function showText(box, text) {
  box.replaceChildren(...text.split(/^```.*\n?/m).flatMap((piece, index) => (
    index % 2 ? [element("pre", "code", piece)] : piece.split(/`([^`\n]+)`/).map((part, at) => (at % 2 ? element("code", "", part) : part))
  )));
}

function knobs() {
  return Object.fromEntries(KNOBS.map((name) => [name, $(name).value === "" ? null : Number($(name).value)]));
}

function busy(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop").disabled = controller === null;
  $("turns").setAttribute("aria-busy", String(controller !== null));
}

function summary({ tokens, first, perSecond, reason }) {
  const parts = [
    tokens === null ? null : `${tokens} tokens`,
    first === null ? null : `first after ${Math.round(first)} ms`,
    perSecond === null ? null : `${perSecond.toFixed(1)} tokens/s`,
    reason,
  ];
  return parts.filter((part) => part !== null).join(" · ");
}

async function send() {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const prompt = $("prompt").value;
  if (running || !prompt) return;
  const asked = [...(mode === "chat" ? turns : []), { role: "user", text: prompt }];
  addTurn(mode === "chat" ? "user" : "prompt", prompt);
  $("prompt").value = "";
  const parts = addTurn("assistant", "");
  if (mode !== "chat") parts.text.classList.add("code");
  const log = $("turns");
  let said = "";
  const controller = new AbortController();
  busy(controller);
  try {
    const done = await ask(mode, requestBody(mode, watch.model ?? null, asked, knobs()), headers(), controller.signal, (text, reasoning) => {
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (reasoning && !parts.reasoning) addReasoning(parts);
      if (reasoning) parts.reasoning.append(reasoning); // a text node, as all that a model says here
      if (text && parts.summary?.textContent === "Reasoning …") {
        parts.summary.textContent = "Reasoning";
        parts.details.open = false;
      }
      said += text;
      if (text) mode === "chat" ? showText(parts.text, said) : parts.text.append(text);
      if (atEnd) log.scrollTop = log.scrollHeight;
    });
    parts.footer.textContent = summary(done);
  } catch (error) {
    parts.article.classList.add("failed");
    const gone = error instanceof TypeError ? "the server does not answer" : error.message;
    parts.footer.textContent = error.name === "AbortError" ? "stopped" : gone;
  }
  if (parts.summary) parts.summary.textContent = "Reasoning";
  if (mode === "chat" && said) turns = [...asked, { role: "assistant", text: said }];
  busy(null);
}

async function record() {
  const response = await fetch("/start_expert_distribution_record", { method: "POST", headers: headers() });
  notice(response.ok ? null : await messageOf(response));
}

const watch = new Watch(headers, (trouble) => {
  if (trouble !== null || $("notice").dataset.from === "watch") notice(trouble);
  $("notice").dataset.from = trouble === null ? "" : "watch";
});

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("turns").replaceChildren();
  $("prompt").focus();
});
$("record").addEventListener("click", record);
for (const example of document.querySelectorAll("#examples button")) {
  example.addEventListener("click", () => {
    document.querySelector(`input[name=mode][value=${example.dataset.mode}]`).checked = true;
    $("prompt").value = example.textContent;
    if (example.dataset.temperature) $("temperature").value = example.dataset.temperature;
    $("prompt").focus();
  });
}
$("key").value = sessionStorage.getItem("dsjax-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("dsjax-key", $("key").value);
  watch.info = null; // whether the new key is the admin's
  watch.read();
});
watch.run();
