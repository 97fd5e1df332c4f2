// One answer, streamed: the request's body, server-sent events, and how fast they came.

/** What to send. turns: [{role, text}], the last one the user's; knobs: numbers by OpenAI's field name, null for none. */
export function requestBody(mode, model, turns, knobs) {
  const set = Object.fromEntries(Object.entries(knobs).filter(([, value]) => value !== null));
  const common = { model, ...set, stream: true, stream_options: { include_usage: true } };
  if (mode === "completion") return { ...common, prompt: turns.at(-1).text };
  const messages = turns.filter(({ text }) => text).map(({ role, text }) => ({ role, content: text }));
  return { ...common, messages };
}

/** The data of each server-sent event of a response, as parsed JSON, up to [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** What an error answer says, whatever it is. */
export async function messageOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/**
 * Ask, and call `onText(text, reasoning)` with each addition. Gives {tokens, first, perSecond, reason}: milliseconds to the first
 * text, tokens a second after it. Throws an Error with a message for people.
 */
export async function ask(mode, body, headers, signal, onText) {
  const path = mode === "completion" ? "/v1/completions" : "/v1/chat/completions";
  const begun = performance.now();
  const options = { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await fetch(path, options);
  if (!response.ok) throw new Error(await messageOf(response));
  let first = null;
  let tokens = null;
  let reason = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) tokens = event.usage.completion_tokens;
    for (const choice of event.choices ?? []) {
      const delta = choice.delta ?? {};
      const text = choice.text ?? delta.content ?? "";
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (text || reasoning) {
        first ??= performance.now();
        onText(text, reasoning);
      }
      reason = choice.finish_reason ?? reason;
    }
  }
  const seconds = first === null ? 0 : (performance.now() - first) / 1000;
  return {
    tokens,
    first: first === null ? null : first - begun,
    perSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    reason,
  };
}
