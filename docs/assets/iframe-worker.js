// Browsers start no Worker on pages from the file system. There, the search's worker runs in a hidden frame instead,
// so that the built site can be searched without a server and without a network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      this.ready = new Promise((resolve) => (frame.loaded = resolve))
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = async (...urls) => {
        for (const one of urls) await load(inner.document, one)
      }
      load(inner.document, url).then(frame.loaded)
      this.inner = inner
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inner.frameElement.remove()
    }
  }
}

function load(page, url) {
  return new Promise((resolve, reject) => {
    const script = page.createElement("script")
    script.onload = resolve
    script.onerror = () => reject(new Error(`not loaded: ${url}`))
    script.src = url
    page.body.append(script)
  })
}
