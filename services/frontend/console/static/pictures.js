const element = (id) => document.getElementById(id);

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve(reader.result));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(file);
});

// The pictures of the next message: chosen, dropped on the conversation, or pasted. They are sent as data URLs.
export class Pictures {
  constructor() {
    this.urls = [];
    this.taken = false;
    element("picture").addEventListener("click", () => element("files").click());
    element("files").addEventListener("change", () => { this.add(element("files").files); element("files").value = ""; });
    element("prompt").addEventListener("paste", (event) => {
      if (this.add(event.clipboardData.files)) event.preventDefault();
    });
    const talk = document.querySelector(".talk");
    talk.addEventListener("dragover", (event) => {
      if (this.taken && event.dataTransfer.types.includes("Files")) { event.preventDefault(); talk.classList.add("drop"); }
    });
    talk.addEventListener("dragleave", () => talk.classList.remove("drop"));
    talk.addEventListener("drop", (event) => {
      talk.classList.remove("drop");
      if (this.add(event.dataTransfer.files)) event.preventDefault();
    });
  }

  // Shows or hides the button; a model without pictures is sent none.
  offer(taken) {
    this.taken = taken;
    element("picture").hidden = !taken;
    if (!taken) this.take();
  }

  // Adds the pictures among `files`; returns whether there are any.
  add(files) {
    const pictures = this.taken ? [...files].filter((file) => file.type.startsWith("image/")) : [];
    Promise.all(pictures.map(read)).then((urls) => { this.urls.push(...urls); this.draw(); }, () => this.draw());
    return pictures.length > 0;
  }

  // Returns the pictures and forgets them.
  take() {
    const urls = this.urls;
    this.urls = [];
    this.draw();
    return urls;
  }

  draw() {
    element("pictures").hidden = this.urls.length === 0;
    element("pictures").replaceChildren(...this.urls.map((url, index) => {
      const remove = Object.assign(document.createElement("button"), { type: "button", title: "Remove this picture" });
      remove.append(thumbnail(url));
      remove.addEventListener("click", () => { this.urls.splice(index, 1); this.draw(); });
      return remove;
    }));
  }
}

export const thumbnail = (url) => Object.assign(document.createElement("img"), { src: url, alt: "attached picture" });

// The content of a user's message: text alone, or parts with the pictures in front of it.
export const content = (text, urls) => (urls.length === 0 ? text : [
  ...urls.map((url) => ({ type: "image_url", image_url: { url } })),
  ...(text ? [{ type: "text", text }] : []),
]);
