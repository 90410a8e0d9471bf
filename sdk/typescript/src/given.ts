// Fields that a caller left out are left out of the request, too.

type Given<T> = { [K in keyof T]?: Exclude<T[K], undefined> };

/** The fields of an object that have a value. */
export function given<T extends object>(fields: T): Given<T> {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)) as Given<T>;
}
