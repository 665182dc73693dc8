// Runs the script of the viewer's page, and prints what the page shows after each action.
//
//     node page_in_node.js PAGE ADDRESS ACTIONS
//
// PAGE is a file, ADDRESS that of its server, or any if the page has its data. ACTIONS is a
// JSON list: ["click", K] on the row K, ["play", K] for K clicks at once, or [ID, VALUE] of an
// input; several values follow each other at once. Elements keep what they are told, and draw
// nothing; time that the page waits passes at once.
"use strict";
const fs = require("fs"), vm = require("vm");
const [page, address, actions] = process.argv.slice(2);
const html = fs.readFileSync(page, "utf8");

class Element {
  constructor(tag) {
    Object.assign(this, {tag, children: [], style: {}, className: "", text: ""});
    Object.assign(this, {clientHeight: 480, scrollTop: 0, listeners: []});
    this.classList = {toggle: (name, on) => { this.isChosen = on && name === "chosen"; }};
  }
  get textContent() { return this.text + this.children.map(c => c.textContent).join(""); }
  set textContent(text) { this.replaceChildren(); this.text = String(text); }
  get value() { return this.set ?? this.children[0]?.value ?? ""; }
  set value(value) { this.set = String(value); }
  get nextElementSibling() { return this.parent.children[this.parent.children.indexOf(this) + 1]; }
  append(child) { child.parent = this; this.children.push(child); }
  replaceChildren() { this.text = ""; this.children = []; }
  addEventListener(name, listener) { this.listeners.push(listener); }
  querySelectorAll(tag) {
    return this.children.flatMap(c => [...(c.tag === tag ? [c] : []), ...c.querySelectorAll(tag)]);
  }
  getContext() { return new Proxy({}, {get: () => () => {}, set: () => true}); }
  async decode() { if (!(await fetch(this.src)).ok) throw Error("no picture"); }
}

const byId = {};
for (const [, id] of html.matchAll(/ id="(\w+)"/g)) byId[id] = new Element(id);
byId.saved.text = html.match(/<script id="saved"[^>]*>(.*?)<\/script>/s)[1];
const FRAME = Number(html.match(/FRAME_MS = (\d+)/)[1]);  // Of a page that plays.
let waiting = 0, frames = 0, together = 0;  // Waits for a frame, and those during another one.
const ask = globalThis.fetch, later = globalThis.setTimeout;
Object.assign(globalThis, {
  document: {
    getElementById: id => byId[id],
    createElement: tag => new Element(tag),
    querySelector: () => new Element("form"),
  },
  window: {},
  location: {search: new URL(address).search},
  setTimeout: (call, milliseconds) => {
    if (milliseconds !== FRAME) return later(call, milliseconds);
    together += frames++ > 0;
    return later(() => { frames -= 1; call(); }, 0);
  },
  fetch: async request => {
    waiting += 1;
    try { return await ask(new URL(request, address)); } finally { waiting -= 1; }
  },
});

async function settled() {
  for (let quiet = 0; quiet < 50; quiet = waiting ? 0 : quiet + 1) {
    await new Promise(done => later(done, waiting ? 5 : 0));
  }
}

function shown() {
  const texts = (id, tag) => byId[id].querySelectorAll(tag).map(e => e.textContent);
  const rows = byId.list.children.filter(row => row.tag === "button");
  const names = ["about", "at", "count", "message", "play", "pictures"];
  return {
    ...Object.fromEntries(names.map(name => [name, byId[name].textContent])),
    rows: rows.map(row => row.children.map(cell => cell.textContent)),
    chosen: rows.filter(row => row.isChosen).map(row => row.children[0].textContent),
    headings: texts("agents", "h2"),
    captions: texts("agents", "figcaption"),
    together,
  };
}

async function main() {
  vm.runInThisContext(html.match(/<script>(.*?)<\/script>/s)[1]);
  await settled();
  const states = [shown()];
  for (const [name, value] of JSON.parse(actions)) {
    if (name === "click") byId.list.querySelectorAll("button")[value].onclick();
    else if (name === "play") for (let k = 0; k < value; k++) byId.play.onclick();
    else {
      for (const typed of [value].flat()) {
        byId[name].value = typed;
        byId[name].oninput();
        byId[name].listeners.forEach(listener => listener());
      }
    }
    await settled();
    states.push(shown());
  }
  console.log(JSON.stringify(states));
}
main();
