const element = (id) => document.getElementById(id);

// Uses the console's API key, stored per tab, for the document and for every call tried here.
const key = element("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => { sessionStorage.setItem("key", key.value); read(); });

const headers = () => (key.value ? { authorization: `Bearer ${key.value}` } : {});

function tell(text) {
  element("status").textContent = text;
  element("status").hidden = !text;
}

async function read() {
  let answer;
  try {
    answer = await fetch("../openapi.json", { headers: headers() });
  } catch { return tell("The frontend does not answer."); }
  if (answer.status === 401) {
    key.focus();
    return tell(key.value ? "This is an unknown API key." : "This cluster requires an API key: enter yours at the top right.");
  }
  if (!answer.ok) return tell(`The frontend answers ${answer.status} ${answer.statusText}.`);
  if (!window.SwaggerUIBundle) return tell("Trying calls here needs the package fastapi-offline; the document is available without it.");
  tell("");
  window.SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#swagger",
    requestInterceptor: (request) => { Object.assign(request.headers, headers()); return request; },
  });
}
read();
