// `await using` where the engine has it. Node before 18.18 has no Symbol.asyncDispose: there `kill()` is the way.

/** The name of the method that `await using` calls. */
export const asyncDispose: typeof Symbol.asyncDispose =
  Symbol.asyncDispose ?? (Symbol.for("Symbol.asyncDispose") as typeof Symbol.asyncDispose);
