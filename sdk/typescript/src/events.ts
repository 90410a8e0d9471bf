// Server-sent events.

import type { Event } from "./api/daemon.js";

/** The client was too slow, or away for too long: it missed events, or null if the daemon restarted. */
export interface Lagged {
  kind: "lagged";
  missed: number | null;
}

/** The longest event: longer ones come from no daemon. */
const MAX_EVENT = 1024 * 1024;

/** The events in a stream of bytes. */
export async function* eventsOf(bytes: AsyncIterable<Uint8Array>): AsyncGenerator<Event | Lagged, void, undefined> {
  const decoder = new TextDecoder();
  let rest = "";
  let kind = "";
  let data: string[] = [];
  for await (const piece of bytes) {
    const lines = (rest + decoder.decode(piece, { stream: true })).split(/\r?\n/);
    rest = lines.pop() ?? "";
    if (rest.length > MAX_EVENT) throw new RangeError("an event is longer than 1 MiB; is this a forkd daemon?");
    for (const line of lines) {
      if (line.startsWith("event:")) kind = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length > 0) {
        const value: unknown = JSON.parse(data.join("\n"));
        data = [];
        yield kind === "lagged" ? { kind, missed: (value as Lagged).missed } : (value as Event);
      }
    }
  }
}
