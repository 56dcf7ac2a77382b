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

/** Conversations by id. Where IndexedDB is off they live as long as the page. */
class Conversations {
  #memory = new Map();
  #database = null;

  /** True if what is put here stays. */
  async open() {
    try {
      this.#database = await new Promise((resolve, reject) => {
        const asked = indexedDB.open("forerun", 1);
        asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", { keyPath: "id" });
        asked.onsuccess = () => resolve(asked.result);
        asked.onerror = () => reject(asked.error);
      });
    } catch {
      this.#database = null;
    }
    return this.#database !== null;
  }

  async all() {
    const found = this.#database ? await this.#do("readonly", (store) => store.getAll()) : [...this.#memory.values()];
    return found.sort((one, other) => other.updated - one.updated);
  }

  async put(conversation) {
    if (!this.#database) this.#memory.set(conversation.id, conversation);
    else await this.#do("readwrite", (store) => store.put(structuredClone(conversation)));
  }

  async remove(id) {
    this.#memory.delete(id);
    if (this.#database) await this.#do("readwrite", (store) => store.delete(id));
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
