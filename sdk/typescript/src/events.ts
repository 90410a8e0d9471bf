// Server-sent events.

import type { Event } from "./api/daemon.js";
import { broken } from "./errors.js";

/** The client was too slow, or away for too long: it missed events, or null if the daemon restarted. */
export interface Lagged {
  kind: "lagged";
  missed: number | null;
}

/** The longest event: longer ones come from no daemon. */
const MAX_EVENT = 1024 * 1024;
const WHAT = "GET /v1/events";

/** The events in a stream of bytes. */
export async function* eventsOf(bytes: AsyncIterable<Uint8Array>): AsyncGenerator<Event | Lagged, void, undefined> {
  const decoder = new TextDecoder();
  let rest = "";
  let kind = "";
  let data: string[] = [];
  let length = 0;
  for await (const piece of bytes) {
    const lines = (rest + decoder.decode(piece, { stream: true })).split(/\r?\n/);
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line.startsWith("event:")) kind = line.slice(6).trim();
      else if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
        length += line.length;
      } else if (line === "") {
        if (data.length > 0) yield eventOf(kind, data.join("\n"));
        [kind, data, length] = ["", [], 0];
      }
    }
    if (length + rest.length > MAX_EVENT) {
      throw broken(WHAT, new RangeError("an event is longer than 1 MiB; is this a forkd daemon?"));
    }
  }
}

function eventOf(kind: string, data: string): Event | Lagged {
  let value: unknown;
  try {
    value = JSON.parse(data);
  } catch (cause) {
    throw broken(WHAT, cause);
  }
  if (typeof value !== "object" || value === null) throw broken(WHAT, new TypeError("an event is no object"));
  return kind === "lagged" ? { kind, missed: (value as Lagged).missed } : (value as Event);
}
