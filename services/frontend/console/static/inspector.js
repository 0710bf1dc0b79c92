import { thumbnail } from "./pictures.js";

const element = (id) => document.getElementById(id);
const PARTS = ["fetch", "preprocess", "tokenize", "schedule", "encode", "prefill", "decode"];
const MOST = 20;

const build = (name, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};
const ms = (value) => (value == null ? "–" : value < 10 ? `${value.toFixed(2)} ms` : value < 10000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -0.01 ? 1 : 2)} %`;

// Shows the playground's answers: latency breakdown and token probabilities.
export class Inspector {
  constructor(show) {
    this.show = show;
    this.answers = [];
  }

  add(answer) {
    this.answers = [answer, ...this.answers].slice(0, MOST);
    this.draw(answer);
  }

  open(answer) {
    this.draw(answer);
    this.show();
  }

  draw(answer) {
    element("nothing").hidden = true;
    element("inspected").hidden = false;
    element("requests").replaceChildren(...this.answers.map((other) => {
      const button = build("button", { textContent: other.prompt, title: other.id ?? "" });
      button.setAttribute("aria-pressed", other === answer);
      button.addEventListener("click", () => this.draw(other));
      return button;
    }));
    element("shown").replaceChildren(...answer.pictures.map(thumbnail));
    this.budget(answer);
    this.tokens(answer);
  }

  budget({ metrics, begun, ended, usage, id }) {
    const parts = PARTS.map((name) => [name, metrics?.[`${name}_time_ms`] ?? 0]);
    const whole = ended - begun;
    const known = parts.reduce((sum, [, time]) => sum + time, 0);
    parts.push(["write", Math.max(0, whole - known)]);
    element("budget").replaceChildren(...parts.filter(([, time]) => time > 0).map(([name, time]) =>
      build("div", { className: name, title: `${name}: ${ms(time)}`, style: `flex-grow: ${time}`, textContent: time / whole > 0.09 ? `${name} ${ms(time)}` : "" })));
    const figures = [
      ["total", ms(whole)], ["first token", ms(metrics?.time_to_first_token_ms)], ["queue", ms(metrics?.queue_time_ms)],
      ["between tokens", ms(metrics?.mean_itl_ms)], ["tokens/s", metrics?.tokens_per_second ? Math.round(metrics.tokens_per_second) : "–"],
      ["prompt", `${usage?.prompt_tokens ?? "–"} tokens`], ["cached", `${usage?.prompt_tokens_details?.cached_tokens ?? 0} tokens`],
      ["output", `${usage?.completion_tokens ?? "–"} tokens`], ["request", id ? id.slice(0, 12) : "–"],
    ];
    element("figures").replaceChildren(...figures.map(([name, value]) => build("div", {}, build("dt", { textContent: name }), build("dd", { textContent: value }))));
  }

  tokens({ tokens }) {
    element("alternatives").replaceChildren();
    element("tokens").replaceChildren(...tokens.map((token) => {
      const sure = Math.exp(token.logprob);
      const span = build("span", { textContent: token.token, title: percent(token.logprob), tabIndex: 0 });
      span.style.background = `hsl(${Math.round(130 * sure)} 70% 55% / ${(0.6 - 0.3 * sure).toFixed(2)})`;
      for (const event of ["mouseenter", "focus"]) span.addEventListener(event, () => this.alternatives(token));
      return span;
    }));
  }

  alternatives({ top_logprobs: top }) {
    element("alternatives").replaceChildren(...top.flatMap(({ token, logprob }) => [
      build("span", { textContent: JSON.stringify(token) }),
      build("i", { style: `width: ${100 * Math.exp(logprob)}%` }),
      build("span", { textContent: percent(logprob) }),
    ]));
  }
}
