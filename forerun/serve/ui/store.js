/** What stays in this browser: settings in local storage, conversations in IndexedDB. */

const PREFIX = "forerun.";

/** A setting; `otherwise` where there is none or none can be read. */
export function load(name, otherwise) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** Keep a setting; null forgets it. Nothing happens where the browser keeps nothing. */
export function save(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Storage is off or full: the page works, it only forgets.
  }
}

/**
 * One conversation of two versions: what either tab added is there, what either deleted is not. Of a
 * message that both have the later version counts, and of title and settings those of `ours`.
 */
export function merged(ours, stored) {
  if (!stored) return ours;
  const removed = [...new Set([...(stored.removed ?? []), ...(ours.removed ?? [])])];
  const mine = new Map(ours.messages.map((message) => [message.id, message]));
  const known = new Set(stored.messages.map((message) => message.id));
  const both = stored.messages.map((message) => {
    const own = mine.get(message.id);
    return own && (own.changed ?? 0) >= (message.changed ?? 0) ? own : message;
  });
  const added = ours.messages.filter((message) => !known.has(message.id));
  const messages = [...both, ...added].filter((message) => !removed.includes(message.id));
  return { ...ours, removed, messages };
}

/**
 * Conversations by id, shared by all tabs. Where IndexedDB is off they live as long as the page.
 * Fires "elsewhere" with the id of a conversation that another tab has put or removed.
 */
class Conversations extends EventTarget {
  #memory = new Map();
  #database = null;
  #channel = null;

  /** True if what is put here stays. */
  async open() {
    try {
      this.#database = await new Promise((resolve, reject) => {
        const asked = indexedDB.open("forerun", 1);
        asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
        asked.onsuccess = () => resolve(asked.result);
        asked.onerror = () => reject(asked.error);
      });
      this.#channel = new BroadcastChannel("forerun.conversations");
      this.#channel.onmessage = ({ data }) => this.dispatchEvent(new CustomEvent("elsewhere", { detail: data }));
    } catch {
      this.#database = null;
    }
    return this.#database !== null;
  }

  async all() {
    const found = this.#database ? await this.#do("readonly", (store) => store.getAll()) : [...this.#memory.values()];
    return found.sort((one, other) => other.updated - one.updated);
  }

  /** The stored version; undefined where there is none. */
  async get(id) {
    return this.#database ? this.#do("readonly", (store) => store.get(id)) : this.#memory.get(id);
  }

  /** Keep a conversation, together with what another tab has added to it; the version that is kept. */
  async put(conversation) {
    if (!this.#database) {
      this.#memory.set(conversation.id, conversation);
      return conversation;
    }
    const ours = structuredClone(conversation);
    const kept = await new Promise((resolve, reject) => {
      // One transaction: no other tab writes between the look and the write.
      const transaction = this.#database.transaction("conversations", "readwrite");
      const store = transaction.objectStore("conversations");
      const asked = store.get(ours.id);
      let found;
      asked.onsuccess = () => store.put(found = merged(ours, asked.result));
      transaction.oncomplete = () => resolve(found);
      transaction.onerror = () => reject(transaction.error);
      transaction.onabort = () => reject(transaction.error);
    });
    this.#channel.postMessage({ id: ours.id });
    return kept;
  }

  async remove(id) {
    this.#memory.delete(id);
    if (!this.#database) return;
    await this.#do("readwrite", (store) => store.delete(id));
    this.#channel.postMessage({ id });
  }

  #do(mode, act) {
    return new Promise((resolve, reject) => {
      const asked = act(this.#database.transaction("conversations", mode).objectStore("conversations"));
      asked.onsuccess = () => resolve(asked.result);
      asked.onerror = () => reject(asked.error);
    });
  }
}

export const conversations = new Conversations();
