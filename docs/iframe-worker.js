// Browsers start no workers for pages from a folder. There the site's search runs in a frame.
"use strict";

if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      this.ready = new Promise((done) => script.addEventListener("load", done));
      script.src = url;
      frame.contentDocument.body.append(script);
    }
    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  };
