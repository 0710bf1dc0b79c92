const element = (id) => document.getElementById(id);
const POLL_MS = 1000;
const COLUMN = { ROLE_FRONTEND: 0, ROLE_SCHEDULER: 1, ROLE_REDIS: 1, ROLE_WORKER: 2 };
const WIDE = 1000, BOX = 270, NARROW = 700, HEIGHTS = { ROLE_WORKER: 92 }, HEIGHT = 62, GAP = 16;
const MAX_EVENTS = 50, MAX_RATES = 240;

const svg = (name, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
  node.append(...children);
  return node;
};
const number = (value) => Number(value ?? 0);
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const short = (value) => (number(value) < 100_000 ? number(value).toLocaleString("en") : SHORT.format(number(value)));
const word = (name) => name.split("_").slice(1).join(" ").toLowerCase();
const grade = (state) => ({ STATE_READY: "good", STATE_STALLED: "bad", STATE_DOWN: "bad" })[state] ?? "warn";

// Polls the services and lists what changed between two polls.
export class Cluster {
  // `onAnswer`: called when the cluster answers for the first time, or again.
  constructor(call, onAnswer) {
    this.call = call;
    this.onAnswer = onAnswer;
    this.before = null;
    this.rates = [];
    this.answers = false;
    this.lookNow();
  }

  lookNow() {
    clearTimeout(this.timer);
    this.poll();
  }

  async poll() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const [answer, services] = await this.ask();
    if (turn !== this.turn) return; // another poll has started meanwhile
    if (services) this.draw(services);
    else this.lose(answer);
    this.timer = setTimeout(() => this.poll(), document.hidden ? 5 * POLL_MS : POLL_MS);
  }

  // Handles a poll's answer (null if there was none) and the services, if it contains them.
  async ask() {
    let answer = null;
    try {
      answer = await this.call("cluster");
      return [answer, answer.ok ? (await answer.json()).services : null];
    } catch { return [null, null]; }
  }

  vital(how, what) {
    element("vital-state").className = `dot ${how}`;
    element("vital-word").textContent = what;
  }

  notice(text) {
    element("notice").textContent = text;
    element("notice").hidden = !text;
  }

  // Handles a failed poll: the last state is outdated.
  lose(answer) {
    if (this.answers) this.event(answer ? `the frontend answers ${answer.status}` : "the frontend does not answer");
    this.answers = false;
    this.before = null;
    this.rates = [];
    for (const id of ["vital-rate", "vital-running", "vital-waiting"]) element(id).textContent = "–";
    this.curve();
    element("map").classList.add("stale");
    if (answer?.status === 401) {
      this.vital("warn", "key required");
      this.notice(element("key").value ? "This is an unknown API key." : "This cluster requires an API key: enter yours at the top right.");
    } else {
      this.vital("bad", "unreachable");
      this.notice(answer ? `The frontend answers ${answer.status} ${answer.statusText}.` : "The frontend does not answer. The picture shows the last known state.");
    }
  }

  draw(services) {
    if (!this.answers) this.onAnswer();
    this.answers = true;
    element("map").classList.remove("stale");
    const now = new Map(services.map((service) => [`${service.role} ${service.id}`, service]));
    const schedulers = services.filter(({ role }) => role === "ROLE_SCHEDULER");
    const sum = (read) => schedulers.reduce((total, service) => total + number(read(service)), 0);
    this.rates = [...this.rates, this.rate(services)].slice(-MAX_RATES);
    element("vital-rate").textContent = Math.round(this.rates.at(-1)).toLocaleString("en");
    element("vital-running").textContent = sum((s) => s.running);
    element("vital-waiting").textContent = sum((s) => s.waiting);
    this.judge(services);
    const moved = this.tell(now);
    if (!element("cluster").hidden) { this.map(services, moved); this.curve(); }
    this.before = now;
    this.looked = performance.now();
  }

  judge(services) {
    const ill = services.filter(({ state }) => grade(state) === "bad");
    const workers = services.filter(({ role, state }) => role === "ROLE_WORKER" && grade(state) !== "bad");
    if (!workers.length) this.vital("warn", "no worker");
    else if (ill.length) this.vital("bad", `${ill[0].id} ${word(ill[0].state)}`);
    else this.vital("good", "ready");
    this.notice(workers.length ? "" : "There is no worker: running requests wait for one, and new requests wait or are refused.");
  }

  // Tokens per second since the last poll.
  rate(services) {
    if (!this.before) return 0;
    const seconds = (performance.now() - this.looked) / 1000;
    let more = 0;
    for (const service of services) {
      const before = this.before.get(`${service.role} ${service.id}`);
      if (service.role !== "ROLE_WORKER" || before?.epoch !== service.epoch) continue;
      more += Math.max(0, number(service.work?.generated_tokens) - number(before.work?.generated_tokens));
    }
    return more / seconds;
  }

  // Returns whether sequences have moved to other workers.
  tell(now) {
    if (!this.before) return false;
    let moved = 0;
    for (const [key, service] of now) {
      const before = this.before.get(key);
      if (!before) this.event(`${service.id} joined`);
      else if (before.state !== service.state) this.event(`${service.id}: ${word(before.state)} → ${word(service.state)}`);
      else if (before.epoch !== service.epoch) this.event(`${service.id} restarted`);
      moved += number(service.sequences_moved) - number(before?.sequences_moved);
    }
    for (const [key, service] of this.before) if (!now.has(key)) this.event(`${service.id} left`);
    const stayed = ([key, { role, state, epoch }]) => role === "ROLE_WORKER" && grade(state) !== "bad" && this.before.get(key)?.epoch === epoch;
    const goOn = [...now].some(stayed);
    if (moved > 0) this.event(`${moved} ${moved === 1 ? "sequence" : "sequences"} ${goOn ? "moved to other workers" : "wait for a worker"}`);
    return moved > 0 && goOn;
  }

  event(text) {
    const time = Object.assign(document.createElement("time"), { textContent: new Date().toLocaleTimeString() });
    const line = document.createElement("li");
    line.append(time, text);
    element("events").prepend(line);
    while (element("events").children.length > MAX_EVENTS) element("events").lastChild.remove();
  }

  map(services, moved) {
    const map = element("map");
    const columns = [[], [], []];
    for (const service of services) columns[COLUMN[service.role] ?? 1].push(service);
    const narrow = map.clientWidth < NARROW;
    const { places, width, height } = narrow ? stacked(columns, map.clientWidth) : beside(columns);
    const links = [];
    for (const scheduler of columns[1].filter(({ role }) => role === "ROLE_SCHEDULER")) {
      const to = places.get(scheduler), draw = narrow ? down : across;
      for (const frontend of columns[0]) links.push(draw(places.get(frontend), to, frontend.running > 0, false));
      for (const worker of columns[2]) links.push(draw(to, places.get(worker), worker.running > 0, moved));
    }
    const boxes = [...places].map(([service, place]) => box(service, place));
    map.setAttribute("viewBox", `0 0 ${width} ${height}`);
    map.style.minHeight = narrow ? `${height}px` : "";
    map.replaceChildren(...links, ...boxes);
  }

  curve() {
    const highest = Math.max(1, ...this.rates);
    element("curve-top").textContent = this.rates.length ? short(Math.ceil(highest)) : "";
    element("curve-begin").textContent = this.rates.length ? `${this.rates.length * (POLL_MS / 1000)} s ago` : "no figures yet";
    if (!this.rates.length) return element("curve").replaceChildren();
    const step = (MAX_RATES - 1) / Math.max(1, this.rates.length - 1);
    const points = this.rates.map((rate, i) => `${i * step},${58 - (rate / highest) * 54}`);
    element("curve").replaceChildren(
      svg("path", { class: "area", d: `M0,60 L${points.join(" L")} L${MAX_RATES - 1},60 Z` }),
      svg("path", { class: "edge", d: `M${points.join(" L")}` }),
    );
  }
}

const heightOf = ({ role }) => HEIGHTS[role] ?? HEIGHT;

// Layout for wide windows: one column per role, scaled to the window.
function beside(columns) {
  const tall = columns.map((column) => column.reduce((sum, service) => sum + heightOf(service) + GAP, -GAP));
  const height = Math.max(320, ...tall) + 2 * GAP;
  const places = new Map();
  columns.forEach((column, index) => {
    let y = (height - tall[index]) / 2;
    for (const service of column) {
      places.set(service, { x: 20 + index * ((WIDE - 40 - BOX) / 2), y, width: BOX, height: heightOf(service) });
      y += heightOf(service) + GAP;
    }
  });
  return { places, width: WIDE, height };
}

// Layout for narrow windows: services below each other, not scaled.
function stacked(columns, width) {
  const places = new Map();
  let y = GAP;
  for (const column of columns) {
    for (const service of column) {
      places.set(service, { x: 1, y, width: width - 2, height: heightOf(service) });
      y += heightOf(service) + GAP;
    }
    y += GAP;
  }
  return { places, width, height: y };
}

const linked = (path, busy, moved) => svg("path", { class: `link${busy ? " busy" : ""}${moved ? " moved" : ""}`, d: path });

function across(from, to, busy, moved) {
  const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2];
  const middle = (x1 + x2) / 2;
  return linked(`M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, busy, moved);
}

function down(from, to, busy, moved) {
  const x = from.x + from.width / 2;
  return linked(`M${x},${from.y + from.height} L${x},${to.y}`, busy, moved);
}

function box(service, { x, y, width, height }) {
  const how = grade(service.state);
  const group = svg("g", { transform: `translate(${x} ${y})` },
    svg("rect", { class: `box ${how}`, width, height, rx: 12 }),
    svg("circle", { class: `state ${how}`, cx: 20, cy: 23, r: 5 }),
    text(service.worker_role ? `${service.id} (${service.worker_role})` : service.id, 34, 28, ""),
    text(word(service.state), width - 16, 28, "soft", "end"),
    text(`${number(service.running)} running · ${number(service.waiting)} waiting`, 16, 48, "soft"));
  if (service.role === "ROLE_WORKER" && service.blocks) {
    const { total = 1, used = 0, cached = 0 } = service.blocks, bar = width - 32;
    const part = (count) => (count ? Math.max(2, (count / total) * bar) : 0);
    group.append(
      svg("rect", { class: "free", x: 16, y: 60, width: bar, height: 9, rx: 4.5 }),
      svg("rect", { class: "cached", x: 16, y: 60, width: Math.min(bar, part(used) + part(cached)), height: 9, rx: 4.5 }),
      svg("rect", { class: "used", x: 16, y: 60, width: part(used), height: 9, rx: 4.5 }),
      text(`${short(used)} used · ${short(cached)} cached of ${short(total)} blocks`, 16, 83, "soft"));
  }
  return group;
}

function text(content, x, y, kind, anchor = "start") {
  return svg("text", { x, y, class: kind, "text-anchor": anchor }, content);
}
