"use strict";

/*
 * Browsers start no worker for a page that was opened from disk. The search of this site
 * runs in a worker, so there its script runs in a hidden frame instead. The frame has what
 * the search uses of a worker: messages both ways, and importScripts.
 */
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const scope = this.frame.contentWindow;
    scope.document.open(); // Firefox would replace the first document of a frame.
    scope.document.write("<!doctype html><body></body>");
    scope.document.close();
    scope.postMessage = (data) => this.receive(data);
    scope.importScripts = async (...urls) => {
      for (const next of urls) await this.load(next);
    };
    this.ready = this.load(url);
  }

  load(url) {
    const script = this.frame.contentDocument.createElement("script");
    return new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${url} cannot be loaded`));
      script.src = url;
      this.frame.contentDocument.body.append(script);
    });
  }

  receive(data) {
    const event = new MessageEvent("message", { data: structuredClone(data) });
    this.dispatchEvent(event);
    if (this.onmessage) this.onmessage(event);
  }

  postMessage(data) {
    const event = new MessageEvent("message", { data: structuredClone(data) });
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(event));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
