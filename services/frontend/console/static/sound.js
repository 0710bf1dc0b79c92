import { bubble, events } from "./chat.js";

const element = (id) => document.getElementById(id);
const PATH = "v1/audio/transcriptions";

// Sound of the visitor, from a file or the microphone, turned into text by a model that transcribes.
export class Sound {
  constructor(call) {
    this.call = call;
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
  }

  async record() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      bubble("error", "").textContent = `The microphone is not available: ${error.message}`;
      return;
    }
    const pieces = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", (event) => {
      pieces.push(event.data);
      if (this.recorder?.state === "recording") this.listening(true, pieces.length);
    });
    this.recorder.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop();
      this.listening(false);
      this.transcribe(new Blob(pieces, { type: this.recorder.mimeType }), "Recording");
      this.recorder = null;
    });
    this.recorder.start(1000);
    this.listening(true, 0);
  }

  listening(active, seconds) {
    element("microphone").textContent = active ? `Stop recording (${seconds} s)` : "Microphone";
    element("microphone").classList.toggle("active", active);
  }

  // Shows the text as it comes, then the times of its words.
  async transcribe(file, name) {
    bubble("user", name);
    const shown = bubble("assistant writing", "");
    const text = document.createElement("p");
    shown.append(text);
    try {
      for await (const event of events((await this.send(file, name, { stream: "true" })).body)) {
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
    return (await this.send(file, name, { response_format: "verbose_json", "timestamp_granularities[]": "word" })).json();
  }

  async send(file, name, fields) {
    const form = new FormData();
    for (const [field, value] of Object.entries(fields)) form.append(field, value);
    form.append("file", file, name);
    const response = await this.call(PATH, { method: "POST", body: form });
    if (response.status === 401) element("key").focus();
    if (response.ok) return response;
    throw new Error((await response.json()).error?.message ?? response.statusText);
  }
}

// The words of a transcript with their times, as a list.
function times(transcript) {
  const list = Object.assign(document.createElement("ol"), { className: "times" });
  list.append(...(transcript.words ?? []).map(({ start, end, word }) => {
    const time = Object.assign(document.createElement("time"), { textContent: `${start.toFixed(2)}–${end.toFixed(2)}` });
    const entry = document.createElement("li");
    entry.append(time, ` ${word.trim()}`);
    return entry;
  }));
  return list;
}
