const element = (id) => document.getElementById(id);
const LOOK_MS = 1000;
const COLUMN = { ROLE_FRONTEND: 0, ROLE_SCHEDULER: 1, ROLE_REDIS: 1, ROLE_WORKER: 2 };
const WIDTH = 1000, BOX = 230, HEIGHTS = { ROLE_WORKER: 92 }, HEIGHT = 62, GAP = 16;
const MOST_EVENTS = 50, MOST_RATES = 240;

const svg = (name, attributes, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
};
const number = (value) => Number(value ?? 0);
const word = (name) => name.split("_").slice(1).join(" ").toLowerCase();
const grade = (state) => ({ STATE_READY: "good", STATE_STALLED: "bad", STATE_DOWN: "bad" })[state] ?? "warn";

// The services, looked at again and again; what changed between two looks is told.
export class Cluster {
  constructor(call) {
    this.call = call;
    this.before = null;
    this.rates = [];
    this.look();
  }

  async look() {
    try {
      const answer = await this.call("cluster");
      if (answer.ok) this.draw((await answer.json()).services);
      else this.vital(answer.status === 401 ? "warn" : "bad");
    } catch { this.vital("bad"); }
    setTimeout(() => this.look(), document.hidden ? 5 * LOOK_MS : LOOK_MS);
  }

  vital(how) { element("vital-state").className = `dot ${how}`; }

  draw(services) {
    const now = new Map(services.map((service) => [`${service.role} ${service.id}`, service]));
    const schedulers = services.filter(({ role }) => role === "ROLE_SCHEDULER");
    const sum = (read) => schedulers.reduce((total, service) => total + number(read(service)), 0);
    this.rates = [...this.rates, this.rate(services)].slice(-MOST_RATES);
    element("vital-rate").textContent = Math.round(this.rates.at(-1)).toLocaleString("en");
    element("vital-running").textContent = sum((s) => s.running);
    element("vital-waiting").textContent = sum((s) => s.waiting);
    this.vital(services.some(({ state }) => grade(state) === "bad") ? "bad" : services.some(({ role }) => role === "ROLE_WORKER") ? "good" : "warn");
    const moved = this.tell(now);
    if (!element("cluster").hidden) { this.map(services, moved); this.curve(); }
    this.before = now;
    this.looked = performance.now();
  }

  // Tokens generated since the last look, a second.
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

  // Whether sequences have moved to other workers.
  tell(now) {
    if (!this.before) return false;
    let moved = 0;
    for (const [key, service] of now) {
      const before = this.before.get(key);
      if (!before) this.event(`${service.id} is here`);
      else if (before.state !== service.state) this.event(`${service.id}: ${word(before.state)} → ${word(service.state)}`);
      else if (before.epoch !== service.epoch) this.event(`${service.id} came back`);
      moved += number(service.sequences_moved) - number(before?.sequences_moved);
    }
    for (const [key, service] of this.before) if (!now.has(key)) this.event(`${service.id} is gone`);
    if (moved > 0) this.event(`${moved} ${moved === 1 ? "sequence" : "sequences"} moved to other workers`);
    return moved > 0;
  }

  event(text) {
    const time = Object.assign(document.createElement("time"), { textContent: new Date().toLocaleTimeString() });
    const line = document.createElement("li");
    line.append(time, text);
    element("events").prepend(line);
    while (element("events").children.length > MOST_EVENTS) element("events").lastChild.remove();
  }

  map(services, moved) {
    const columns = [[], [], []];
    for (const service of services) columns[COLUMN[service.role] ?? 1].push(service);
    const heightOf = ({ role }) => HEIGHTS[role] ?? HEIGHT;
    const tall = columns.map((column) => column.reduce((sum, service) => sum + heightOf(service) + GAP, -GAP));
    const height = Math.max(320, ...tall) + 2 * GAP;
    const places = new Map();
    columns.forEach((column, index) => {
      let y = (height - tall[index]) / 2;
      for (const service of column) {
        places.set(service, { x: 20 + index * ((WIDTH - 40 - BOX) / 2), y, height: heightOf(service) });
        y += heightOf(service) + GAP;
      }
    });
    const links = [];
    for (const scheduler of columns[1].filter(({ role }) => role === "ROLE_SCHEDULER")) {
      const to = places.get(scheduler);
      for (const frontend of columns[0]) links.push(link(places.get(frontend), to, frontend.running > 0, false));
      for (const worker of columns[2]) links.push(link(to, places.get(worker), worker.running > 0, moved));
    }
    const boxes = [...places].map(([service, place]) => box(service, place));
    const map = element("map");
    map.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    map.replaceChildren(...links, ...boxes);
  }

  curve() {
    const highest = Math.max(1, ...this.rates);
    const points = this.rates.map((rate, i) => `${MOST_RATES - this.rates.length + i},${58 - (rate / highest) * 54}`);
    const first = MOST_RATES - this.rates.length;
    element("curve").replaceChildren(
      svg("path", { class: "area", d: `M${first},60 L${points.join(" L")} L${MOST_RATES - 1},60 Z` }),
      svg("path", { class: "edge", d: `M${points.join(" L")}` }),
    );
  }
}

function link(from, to, busy, moved) {
  const [x1, y1, x2, y2] = [from.x + BOX, from.y + from.height / 2, to.x, to.y + to.height / 2];
  const middle = (x1 + x2) / 2;
  return svg("path", { class: `link${busy ? " busy" : ""}${moved ? " moved" : ""}`, d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` });
}

function box(service, { x, y, height }) {
  const how = grade(service.state);
  const group = svg("g", { transform: `translate(${x} ${y})` },
    svg("rect", { class: `box ${how}`, width: BOX, height, rx: 12 }),
    svg("circle", { class: `state ${how}`, cx: 20, cy: 23, r: 5 }),
    text(service.id, 34, 28, ""),
    text(word(service.state), BOX - 16, 28, "soft", "end"),
    text(`${number(service.running)} running · ${number(service.waiting)} waiting`, 16, 48, "soft"));
  if (service.role === "ROLE_WORKER" && service.blocks) {
    const { total = 1, used = 0, cached = 0 } = service.blocks, width = BOX - 32;
    const part = (count) => (count ? Math.max(2, (count / total) * width) : 0);
    group.append(
      svg("rect", { class: "free", x: 16, y: 60, width, height: 9, rx: 4.5 }),
      svg("rect", { class: "cached", x: 16, y: 60, width: Math.min(width, part(used) + part(cached)), height: 9, rx: 4.5 }),
      svg("rect", { class: "used", x: 16, y: 60, width: part(used), height: 9, rx: 4.5 }),
      text(`${number(used)} used, ${number(cached)} cached of ${number(total)} blocks`, 16, 83, "soft"));
  }
  return group;
}

function text(content, x, y, kind, anchor = "start") {
  return svg("text", { x, y, class: kind, "text-anchor": anchor }, content);
}
