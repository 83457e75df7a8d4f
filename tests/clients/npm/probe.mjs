// What the probes of npm clients share, as python/probe.py does: the task comes in a JSON file, and a result for each
// case goes to another.
import { readFileSync, writeFileSync } from "node:fs";

export const task = JSON.parse(readFileSync(process.argv[2], "utf8"));

/** Runs every case, also after one failed, and writes the results by name. */
export async function run(cases) {
  const results = {};
  for (const [name, probe] of Object.entries(cases)) {
    try {
      results[name] = await probe();
    } catch (error) {
      results[name] = { failed: String(error?.stack ?? error) };
    }
  }
  writeFileSync(process.argv[3], JSON.stringify(results));
}

/** The case for each of the task's ways to have a tool called. */
export const inEachWay = (probe) => async () => {
  const results = {};
  for (const [name, way] of Object.entries(task.tool_ways)) results[name] = await probe(way);
  return results;
};

/** The names of the class and its bases, the HTTP status and the message of what a call throws. `status` names the client's field for it. */
export async function errorOf(call, status = "status") {
  try {
    await call();
  } catch (error) {
    const bases = [];
    for (let at = Object.getPrototypeOf(error); at; at = Object.getPrototypeOf(at)) bases.push(at.constructor.name);
    return { bases, status: error[status] ?? null, message: String(error.message) };
  }
  return { failed: "no error was thrown" };
}
