const element = (id) => document.getElementById(id);
const PATH = "v1/audio/transcriptions";

// Sound of the visitor, from a file or the microphone, turned into text by a model that transcribes.
export class Sound {
  constructor(call, show) {
    this.call = call;
    this.show = show;
    this.recorder = null;
    element("sound").addEventListener("click", () => element("clips").click());
    element("clips").addEventListener("change", () => {
      for (const file of element("clips").files) this.transcribe(file, file.name);
      element("clips").value = "";
    });
    element("microphone").addEventListener("click", () => (this.recorder ? this.recorder.stop() : this.record()));
  }

  // Shows or hides the buttons; `paths`: those that the model has beyond those of all models.
  offer(paths) {
    const taken = paths.some((path) => path.endsWith(PATH));
    element("sound").hidden = !taken;
    element("microphone").hidden = !taken || !navigator.mediaDevices || !window.MediaRecorder;
    element("ask").classList.toggle("hears", taken);
  }

  async record() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      this.show("error", "").textContent = `The microphone is not available: ${error.message}`;
      return;
    }
    const pieces = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", (event) => pieces.push(event.data));
    this.recorder.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop();
      this.listening(false);
      this.transcribe(new Blob(pieces, { type: this.recorder.mimeType }), "Recording");
      this.recorder = null;
    });
    this.recorder.start();
    this.listening(true);
  }

  listening(active) {
    element("microphone").textContent = active ? "Stop recording" : "Microphone";
    element("microphone").classList.toggle("active", active);
  }

  // Shows the text as it comes, then the times of its words or, where the model has none, of its segments.
  async transcribe(file, name) {
    this.show("user", name);
    const shown = this.show("assistant writing", "");
    const text = document.createElement("p");
    shown.append(text);
    try {
      for await (const event of events(await this.send(file, name, { stream: "true" }))) {
        if (event.error) throw new Error(event.error.message);
        if (event.delta) text.textContent += event.delta;
        if (event.type === "transcript.text.done") text.textContent = event.text || "(nothing is said)";
      }
      shown.append(times(await this.timed(file, name)));
    } catch (error) {
      shown.className = "message error";
      shown.textContent = error.message;
    }
    shown.classList.remove("writing");
    shown.scrollIntoView({ block: "end" });
  }

  async timed(file, name) {
    const wanted = { response_format: "verbose_json" };
    try {
      return await (await this.send(file, name, { ...wanted, "timestamp_granularities[]": "word" })).json();
    } catch (error) {
      if (error.status !== 400 && error.status !== 501) throw error;
    }
    return (await this.send(file, name, wanted)).json();
  }

  async send(file, name, fields) {
    const form = new FormData();
    for (const [field, value] of Object.entries(fields)) form.append(field, value);
    form.append("file", file, name);
    const response = await this.call(PATH, { method: "POST", body: form });
    if (response.status === 401) element("key").focus();
    if (response.ok) return response;
    const said = (await response.json()).error?.message ?? response.statusText;
    throw Object.assign(new Error(said), { status: response.status });
  }
}

// The parts of a transcript with their times, as a list: words if there are some, else segments.
function times(transcript) {
  const list = Object.assign(document.createElement("ol"), { className: "times" });
  const parts = transcript.words?.length ? transcript.words : transcript.segments ?? [];
  list.append(...parts.map((part) => {
    const time = Object.assign(document.createElement("time"), { textContent: `${part.start.toFixed(2)}–${part.end.toFixed(2)}` });
    const entry = document.createElement("li");
    entry.append(time, ` ${(part.word ?? part.text).trim()}`);
    return entry;
  }));
  return list;
}

async function* events(response) {
  let rest = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
