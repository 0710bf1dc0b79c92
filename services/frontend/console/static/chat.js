import { Pictures, content, thumbnail } from "./pictures.js";

const element = (id) => document.getElementById(id);

const TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather at a place",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

// A conversation: its messages, and the answer as it streams.
export class Chat {
  constructor(call, inspector) {
    this.call = call;
    this.inspector = inspector;
    this.messages = [];
    this.pictures = new Pictures();
    element("ask").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    element("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.ask(); }
    });
    element("stop").addEventListener("click", () => this.aborting?.abort());
    element("clear").addEventListener("click", () => { this.messages = []; element("messages").replaceChildren(); });
    element("tools-example").addEventListener("click", () => { element("tools").value = JSON.stringify(TOOLS, null, 2); });
    element("schema-example").addEventListener("click", () => { element("schema").value = JSON.stringify(SCHEMA, null, 2); });
    for (const range of document.querySelectorAll("input[type=range]")) {
      const output = document.querySelector(`output[for=${range.id}]`);
      const tell = () => { output.value = Number(range.value).toFixed(2); };
      range.addEventListener("input", tell);
      tell();
    }
  }

  // The request body for the fields; throws for invalid JSON.
  body() {
    const system = element("system").value.trim();
    const body = {
      model: element("model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: Number(element("temperature").value),
      top_p: Number(element("top_p").value),
      max_tokens: Number(element("max_tokens").value),
      stream: true,
      stream_options: { include_usage: true },
      logprobs: true,
      top_logprobs: 5,
      return_metrics: true,
    };
    if (element("seed").value) body.seed = Number(element("seed").value);
    const tools = parsed("tools"), schema = parsed("schema");
    if (tools) body.tools = tools;
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return body;
  }

  async ask() {
    const text = element("prompt").value.trim();
    if (this.aborting || !(text || this.pictures.urls.length)) return;
    const pictures = this.pictures.take();
    this.messages.push({ role: "user", content: content(text, pictures) });
    bubble("user", text).prepend(...pictures.map(thumbnail));
    element("prompt").value = "";
    const shown = bubble("assistant writing", "");
    this.aborting = new AbortController();
    this.busy(true);
    const answer = { prompt: text || "(picture)", pictures, text: "", reasoning: "", calls: [], tokens: [], begun: performance.now(), arrivals: [] };
    try {
      await this.read(answer, shown);
    } catch (error) {
      if (error.name !== "AbortError") { shown.className = "message error"; shown.textContent = explained(error); }
    }
    shown.classList.remove("writing");
    answer.ended = performance.now();
    this.busy(false);
    this.aborting = null;
    if (answer.text || answer.calls.length) {
      this.messages.push(said(answer));
      this.sign(shown, answer);
      this.inspector.add(answer);
    } else if (shown.classList.contains("error")) this.messages.pop();
  }

  async read(answer, shown) {
    const response = await this.call("v1/chat/completions", {
      method: "POST", body: JSON.stringify(this.body()), signal: this.aborting.signal,
    });
    if (response.status === 401) element("key").focus();
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    answer.id = response.headers.get("x-request-id");
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) answer.usage = chunk.usage;
      if (chunk.metrics) answer.metrics = chunk.metrics;
      for (const choice of chunk.choices ?? []) take(answer, choice);
      draw(shown, answer);
    }
  }

  sign(shown, answer) {
    const footer = document.createElement("footer");
    const link = document.createElement("a");
    link.textContent = "inspect";
    link.addEventListener("click", () => this.inspector.open(answer));
    const rate = answer.metrics?.tokens_per_second;
    const figures = [`${answer.usage?.completion_tokens ?? answer.tokens.length} tokens`];
    if (rate) figures.push(`${Math.round(rate)} tokens/s`);
    if (answer.finish) figures.push(`finish reason: ${answer.finish}`);
    footer.append(...figures.map((figure) => Object.assign(document.createElement("span"), { textContent: figure })), link);
    shown.append(footer);
    shown.parentElement.scrollTop = shown.parentElement.scrollHeight;
  }

  busy(isBusy) {
    element("send").hidden = isBusy;
    element("stop").hidden = !isBusy;
  }
}

// A call that did not reach the frontend, or broke off, is a TypeError whose text differs between browsers.
const explained = (error) => (error instanceof TypeError ? "The frontend does not answer. Try again later." : error.message);

function parsed(id) {
  const text = element(id).value.trim();
  if (!text) return null;
  try { return JSON.parse(text); } catch (error) { throw new Error(`${id}: ${error.message}`); }
}

export function bubble(kind, text) {
  const shown = Object.assign(document.createElement("div"), { className: `message ${kind}`, textContent: text });
  element("messages").append(shown);
  element("messages").scrollTop = element("messages").scrollHeight;
  return shown;
}

function take(answer, choice) {
  const delta = choice.delta ?? {};
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  const now = performance.now();
  for (const token of choice.logprobs?.content ?? []) { answer.tokens.push(token); answer.arrivals.push(now); }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function draw(shown, answer) {
  const parts = [];
  if (answer.reasoning) parts.push(Object.assign(document.createElement("span"), { className: "reasoning", textContent: answer.reasoning }));
  parts.push(document.createTextNode(answer.text));
  for (const { function: called } of answer.calls) {
    parts.push(Object.assign(document.createElement("code"), { className: "call", textContent: `${called.name}(${called.arguments})` }));
  }
  shown.replaceChildren(...parts);
  shown.parentElement.scrollTop = shown.parentElement.scrollHeight;
}

const said = ({ text, calls }) => ({ role: "assistant", content: text, ...(calls.length ? { tool_calls: calls } : {}) });

// Parses server-sent events.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
