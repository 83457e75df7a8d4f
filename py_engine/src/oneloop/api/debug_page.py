"""The page of /debug/scheduler: fetches the JSON once a second and shows it. Text only ever gets in as text."""

from __future__ import annotations

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>oneloop scheduler</title>
<style nonce="NONCE">
body { font: 13px/1.4 ui-monospace, monospace; margin: 1em; color: #222; background: #fff }
h2 { font-size: 14px; margin: 1.2em 0 .3em }
table { border-collapse: collapse }
td, th { padding: 0 .8em 0 0; text-align: right; font-weight: normal }
th { color: #777 }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left }
#map { max-width: 128ch; overflow-wrap: anywhere; line-height: 1 }
.free { color: #ccc } .cached { color: #49a } .used { color: #2a2 } .several { color: #c60 }
#steps { display: flex; align-items: flex-end; height: 80px; gap: 1px }
#steps div { width: 10px; background: #2a2 } #steps .prompt { background: #c60 } #steps .preempts { background: #c00 }
#trouble { color: #c00 }
</style></head><body>
<div id="summary">…</div><div id="trouble"></div>
<h2>KV blocks: <span class="free">. free</span> <span class="cached">c cached</span>
<span class="used">u used</span> <span class="several">s used by several</span></h2><div id="map"></div>
<h2>Tokens of the last steps (green: decodes only, orange: with prompts, red: with preemptions)</h2>
<div id="steps"></div>
<h2>Running</h2><table id="running"></table>
<h2>Waiting</h2><table id="waiting"></table>
<script nonce="NONCE">
const part = (id) => document.getElementById(id);
const node = (tag, text, kind) => {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const seconds = (value) => value === null ? "" : value < 1 ? (value * 1e3).toFixed(1) + " ms" : value.toFixed(1) + " s";
const name = (row) => (row.request_id ?? "request " + row.request) + "." + row.index;
const why = ({what, of_request, of_index, needed, available}) => ({
  next_step: "the next step",
  results: "its token that is being computed",
  slots: `rows of the batch: ${needed} needed, ${available} free`,
  blocks: `blocks: ${needed} needed (a margin included), ${available} free or cached`,
  prefix: `${needed} blocks that request ${of_request}.${of_index} is about to compute`,
  turn: `its turn, after request ${of_request}`,
})[what];
const phase = ({num_owed_tokens}) =>
  num_owed_tokens > 1 ? "computes a prompt" : num_owed_tokens ? "decodes" : "its last token is on its way";
const COLUMNS = {
  running: [
    ["request", name],
    ["priority", r => r.priority],
    ["slot", r => r.slot],
    ["prompt", r => r.num_prompt_tokens],
    ["output", r => r.num_output_tokens + "/" + r.max_tokens],
    ["computed", r => r.num_computed_tokens],
    ["owed", r => r.num_owed_tokens],
    ["blocks", r => r.num_blocks],
    ["cached", r => r.num_cached_blocks],
    ["preempted", r => r.num_preemptions],
    ["age", r => seconds(r.age_s)],
    ["", phase],
  ],
  waiting: [
    ["request", name],
    ["priority", r => r.priority],
    ["n", r => r.num_sequences],
    ["prompt", r => r.num_prompt_tokens],
    ["output", r => r.num_output_tokens + "/" + r.max_tokens],
    ["preempted", r => r.num_preemptions],
    ["age", r => seconds(r.age_s)],
    ["waits for", r => why(r.waits_for)],
  ],
};
const KINDS = {".": "free", c: "cached", u: "used", s: "several"};
const fill = (id, children) => part(id).replaceChildren(...children);
const table = (id, rows) => {
  const head = node("tr", "");
  head.append(...COLUMNS[id].map(([title]) => node("th", title)));
  fill(id, [head, ...rows.map((row) => {
    const line = node("tr", "");
    line.append(...COLUMNS[id].map(([, cell]) => node("td", cell(row))));
    return line;
  })]);
};
const show = (view) => {
  const kv = view.kv;
  part("summary").textContent = `${view.state}; ${view.num_running} running, ${view.num_waiting} waiting; step ` +
    `${view.num_steps}, ${view.num_steps_in_flight} in flight; ${view.num_preemptions} preemptions; ` +
    `${kv.num_used} used, ${kv.num_cached} cached, ${kv.num_free} free of ${kv.num_blocks} blocks ` +
    `of ${kv.block_size} tokens (${kv.blocks_per_letter} a letter); ${view.num_generation_tokens} tokens generated`;
  const runs = kv.map.match(/(.)\\1*/g) ?? [];
  fill("map", runs.map((run) => node("span", run, KINDS[run[0]])));
  const most = Math.max(1, ...view.steps.map((step) => step.num_tokens));
  fill("steps", view.steps.map((step) => {
    const kind = step.num_preempted ? "preempts" : step.num_tokens > step.num_rows ? "prompt" : "";
    const bar = node("div", "", kind);
    bar.style.height = Math.max(1, 80 * step.num_tokens / most) + "px";
    bar.title = `step ${step.step_id}: ${step.num_tokens} tokens, ${step.num_rows} rows, ` +
      `${step.num_admitted} admitted, ${step.num_preempted} preempted, ` +
      (step.took_s === null ? "in flight" : "took " + seconds(step.took_s));
    return bar;
  }));
  table("running", view.running);
  table("waiting", view.waiting);
};
const refresh = async () => {
  try {
    const reply = await fetch("?format=json", {cache: "no-store"});
    if (!reply.ok) throw new Error("HTTP " + reply.status);
    show(await reply.json());
    part("trouble").textContent = "";
  } catch (error) {
    part("trouble").textContent = String(error);
  }
  setTimeout(refresh, 1000);
};
refresh();
</script></body></html>
"""


def page(nonce: str) -> str:
    """nonce: of this reply's Content-Security-Policy; nothing else on the page may run."""
    return _PAGE.replace("NONCE", nonce)
