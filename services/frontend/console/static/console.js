import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Inspector } from "./inspector.js";

const element = (id) => document.getElementById(id);

// The key stays in this tab: it is gone when the tab is.
const key = element("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => {
  sessionStorage.setItem("key", key.value);
  listModels();
  cluster.lookNow();
});
const call = (path, options = {}) => {
  const headers = { "content-type": "application/json", ...(key.value ? { authorization: `Bearer ${key.value}` } : {}) };
  return fetch(path, { ...options, headers });
};

const show = (name) => {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", chosen);
    element(tab.dataset.tab).hidden = !chosen;
  }
};
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => show(tab.dataset.tab));

const inspector = new Inspector(() => show("inspector"));
new Chat(call, inspector);
const cluster = new Cluster(call, listModels);

// Where the window is narrow, what is beside the conversation stands above it when it is asked for.
element("settings").addEventListener("click", () => {
  const open = element("sampling").classList.toggle("open");
  element("settings").setAttribute("aria-expanded", open);
});

// Asked when the cluster answers for the first time, or again.
async function listModels() {
  try {
    const answer = await call("v1/models");
    if (!answer.ok) return;
    const { data } = await answer.json();
    const chosen = element("model").value;
    element("model").replaceChildren(...data.map((model) => new Option(model.id, model.id, false, model.id === chosen)));
  } catch { /* the cluster's own look says so */ }
}
