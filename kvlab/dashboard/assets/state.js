// What is shown: the data, the filters (kept in the address, so that a view can be shared), the chosen comparison and cell.

const FILTERS = { name: "Experiment", model: "Model", task: "Task", protocol: "Protocol", query_aware: "Query-aware" };
const LIVE = document.documentElement.dataset.live === "yes";

const state = {
  data: JSON.parse(find("data").textContent),
  filters: {},
  search: "",
  hidden: new Set(),
  comparison: "",
  cell: "",
  measure: "value",
};

const queryAware = (cell) => ({ true: "yes", false: "no" })[cell.query_aware] ?? "";
const valueOf = (cell, filter) => (filter === "query_aware" ? queryAware(cell) : (cell[filter] ?? ""));
const comparisonOf = (cell) => state.data.comparisons.find((one) => one.id === cell.comparison);

// Of a comparison's title the parts that not all of them share.
function shortTitle(comparison) {
  const parts = state.data.comparisons.map((one) => one.title.split(" · "));
  const own = comparison.title.split(" · ").filter((part) => !parts.every((other) => other.includes(part)));
  const task = state.data.cells.find((cell) => cell.comparison === comparison.id).task ?? "";
  return (own.includes(task) || !task ? own : [task, ...own]).join(" · ") || comparison.title;
}

function matches(cell, without = "") {
  for (const [filter, wanted] of Object.entries(state.filters)) {
    if (filter !== without && wanted !== "" && String(valueOf(cell, filter)) !== wanted) return false;
  }
  const text = `${cell.label} ${cell.budget_label ?? ""}`.toLowerCase();
  return cell.full || text.includes(state.search.trim().toLowerCase());
}

const isShown = (cell) => matches(cell) && !state.hidden.has(cell.label);
const shownCells = () => state.data.cells.filter(isShown);
const cellsOf = (id) => shownCells().filter((cell) => cell.comparison === id);
const shownComparisons = () => state.data.comparisons.filter((one) => cellsOf(one.id).length);

// What a file opened twice would share goes into the address; the rest of the state follows from it.
function remember() {
  const kept = new URLSearchParams();
  for (const [filter, wanted] of Object.entries(state.filters)) if (wanted !== "") kept.set(filter, wanted);
  for (const key of ["search", "comparison", "cell"]) if (state[key]) kept.set(key, state[key]);
  if (state.measure !== "value") kept.set("measure", state.measure);
  for (const label of state.hidden) kept.append("without", label);
  try {
    history.replaceState(null, "", `#?${kept}`);
  } catch {
    /* within another page, as on W&B, it may have no address of its own */
  }
}

function recall() {
  if (!location.hash.startsWith("#?")) return;
  const kept = new URLSearchParams(location.hash.slice(2));
  for (const filter of Object.keys(FILTERS)) state.filters[filter] = kept.get(filter) ?? "";
  for (const key of ["search", "comparison", "cell"]) state[key] = kept.get(key) ?? "";
  state.measure = kept.get("measure") === "delta" ? "delta" : "value";
  state.hidden = new Set(kept.getAll("without"));
}
