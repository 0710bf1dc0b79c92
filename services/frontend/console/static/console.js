import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Inspector } from "./inspector.js";
import { Sound } from "./sound.js";

const element = (id) => document.getElementById(id);

// The key is stored per tab and dropped when the tab is closed.
const key = element("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => {
  sessionStorage.setItem("key", key.value);
  listModels();
  cluster.lookNow();
});
const call = (path, options = {}) => {
  const kind = options.body instanceof FormData ? {} : { "content-type": "application/json" };
  const headers = { ...kind, ...(key.value ? { authorization: `Bearer ${key.value}` } : {}) };
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
const chat = new Chat(call, inspector);
const sound = new Sound(call);
const cluster = new Cluster(call, listModels);

// In a narrow window the settings panel opens above the conversation.
element("settings").addEventListener("click", () => {
  const open = element("sampling").classList.toggle("open");
  element("settings").setAttribute("aria-expanded", open);
});

// Called when the cluster answers for the first time, or again after an outage.
async function listModels() {
  try {
    const answer = await call("v1/models");
    if (!answer.ok) return;
    const { data } = await answer.json();
    chat.pictures.offer(data.some((model) => model.input_modalities?.includes("image")));
    sound.offer(data.flatMap((model) => model.supported_endpoints ?? []));
    const chosen = element("model").value;
    element("model").replaceChildren(...data.map((model) => new Option(model.id, model.id, false, model.id === chosen)));
  } catch { /* the cluster view reports it */ }
}
