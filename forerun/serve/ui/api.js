/** Talking to the server that this page came from: requests, streams, errors, and whether it is there. */

import { load, save } from "./store.js";

const BASE = new URL(".", document.baseURI);

/** What the server answered instead; `message` is its own sentence. */
export class ServerError extends Error {
  constructor(status, message, code, retryAfter) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** No answer, or not all of it. */
export class ConnectionError extends Error {}

/**
 * Whether the server is there. An EventTarget that fires "change".
 *
 * state   ok, loading, draining, stopped, locked (it wants a key), gone, connecting
 * fault   why nothing is drafted although it should be, or null
 * models  what is served: {name, context, state, fault}
 * model   the one of these that is asked
 */
class Connection extends EventTarget {
  state = "connecting";
  fault = null;
  models = [];
  model = null;
  #timer = 0;

  /** Look again and again: often while something is wrong, else now and then. */
  async watch() {
    clearTimeout(this.#timer);
    await this.look();
    const pause = this.state === "ok" ? (document.hidden ? 30000 : 5000) : 1000;
    this.#timer = setTimeout(() => this.watch(), pause);
  }

  async look() {
    try {
      const health = await json("health");
      this.fault = health.speculation_fault;
      const cards = (await json("v1/models")).data;
      this.models = cards.map((card) => ({ name: card.id, context: card.max_model_len, state: card.state, fault: card.fault }));
      this.#chosen(load("model", null));
      this.#is("ok");
    } catch (error) {
      this.#is(stateOf(error));
    }
  }

  /** Ask this model from now on. */
  choose(name) {
    save("model", name);
    this.#chosen(name);
    this.dispatchEvent(new Event("change"));
  }

  /** The model of that name; without it one that is loaded, or the first that did not fail. */
  #chosen(name) {
    const found = (wanted) => this.models.find(wanted);
    this.model = found((one) => one.name === name) ?? found((one) => one.state === "loaded")
      ?? found((one) => one.state !== "failed") ?? this.models[0] ?? null;
  }

  /** What a request says of the model: nothing where there is one only. */
  get named() {
    return this.models.length > 1 && this.model ? { model: this.model.name } : {};
  }

  #is(state) {
    const before = this.state;
    this.state = state;
    if (before !== state || state === "ok") this.dispatchEvent(new Event("change"));
  }
}

function stateOf(error) {
  if (!(error instanceof ServerError)) return "gone";
  if (error.status === 401) return "locked";
  return { loading: "loading", shutting_down: "draining", engine_stopped: "stopped" }[error.code] ?? "gone";
}

export const connection = new Connection();

/** The API key: kept for this tab, or for good where the user said so; for this page where the browser keeps nothing. */
let typed = null;
export const key = {
  get() {
    try {
      typed ??= sessionStorage.getItem("forerun.key");
    } catch {
      // Storage is off.
    }
    return typed ?? load("key", "") ?? "";
  },
  kept: () => Boolean(load("key", "")),
  set(value, keep) {
    typed = value;
    try {
      sessionStorage.setItem("forerun.key", value);
    } catch {
      // Storage is off or full.
    }
    save("key", keep ? value : null);
  },
};

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (/[^\x20-\xff]/.test(key.get())) throw new ServerError(401, "The API key has letters that no key can have.", "invalid_api_key");
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(new URL(path, BASE), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionError("The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // Some proxy's own page: the status has to do.
  }
  const message = said.message || `The server answered ${response.status} ${response.statusText}.`;
  return new ServerError(response.status, message, said.code, Number(response.headers.get("retry-after")));
}

export const json = async (path) => (await send(path)).json();
export const text = async (path) => (await send(path)).text();

/** POST a request and yield the JSON of each event. Raises ServerError and ConnectionError. */
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(500, chunk.error.message, chunk.error.code);
    yield chunk;
  }
  throw new ConnectionError("The connection was lost before the answer was complete.");
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6); // Anything else is a comment.
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionError("The connection was lost before the answer was complete.");
  }
}
