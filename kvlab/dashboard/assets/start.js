// Filters, legend and what ties the views together.

const POLL_MS = 4000;

let offered = "";
let polling = false;

function showFilters() {
  find("search").value = state.search;
  const choices = JSON.stringify([
    state.filters,
    Object.keys(FILTERS).map((filter) => distinct(state.data.cells.map((cell) => valueOf(cell, filter)))),
  ]);
  if (choices === offered) return; // one may be open just now
  offered = choices;
  find("selects").replaceChildren(
    ...Object.entries(FILTERS).flatMap(([filter, title]) => {
      const values = distinct(state.data.cells.map((cell) => String(valueOf(cell, filter))))
        .filter((value) => value !== "")
        .sort();
      if (!values.includes(state.filters[filter])) state.filters[filter] = ""; // an address may name what isn't here
      const chosen = state.filters[filter];
      const select = make(
        "select",
        {
          id: `filter-${filter}`,
          onchange: (event) => {
            state.filters[filter] = event.target.value;
            show();
          },
        },
        option("", values.length === 1 ? `all (${values[0]})` : "all", chosen === ""),
        values.map((value) => option(value, value, value === chosen)),
      );
      return make("div", {}, make("label", { for: select.id }, title), select);
    }),
  );
}

function showLegend() {
  const cells = state.data.cells.filter((cell) => matches(cell)),
    full = cells.find((cell) => cell.full);
  const there = distinct([
    ...(full ? [full.label] : []),
    ...policies().filter((label) => cells.some((cell) => cell.label === label)),
  ]);
  find("legend").replaceChildren(
    ...there.map((label) => {
      const shade = look(state.data.cells.find((cell) => cell.label === label)).colour;
      const dot = make("span", { class: "dot", "aria-hidden": "true" });
      Object.assign(dot.style, { borderColor: shade, background: shade });
      return make(
        "button",
        { type: "button", "data-label": label, "aria-pressed": String(!state.hidden.has(label)), onclick: () => toggle(label) },
        dot,
        label,
      );
    }),
  );
}

function toggle(label) {
  if (!state.hidden.delete(label)) state.hidden.add(label);
  show();
  [...find("legend").children].find((button) => button.dataset.label === label)?.focus();
}

function show() {
  const cells = shownCells(),
    failed = cells.filter((cell) => cell.status !== "ok").length;
  find("count").textContent =
    `${cells.length} of ${counted(state.data.cells.length, "cell")}${failed ? `, ${failed} failed` : ""}`;
  showLegend();
  showComparison();
  showBudgets();
  showDifferences();
  showSamples();
  showProvenance();
  remember();
}

function showAll() {
  const { made, where, warnings, cells, comparisons } = state.data;
  find("about").textContent =
    `${where.join(", ")}: ${counted(cells.length, "cell")}, ${counted(comparisons.length, "comparison")}. Read ${made.slice(0, 16).replace("T", " ")}.`;
  find("warnings").replaceChildren(...warnings.map((warning) => make("p", { class: "warning" }, warning)));
  showFilters();
  showAnalyses();
  show();
}

function say(text) {
  find("status").textContent = text;
}

async function poll() {
  if (polling) return;
  polling = true;
  try {
    const answer = await fetch("data.json", { headers: { "If-None-Match": `"${state.data.state}"` } });
    if (answer.status === 304) return say("Live: looks for new results every few seconds.");
    if (!answer.ok) return say(`The page shows what there was: ${await answer.text()}`);
    state.data = await answer.json();
    fetched.clear();
    showAll();
    return say(`Live: updated at ${new Date().toLocaleTimeString()}.`);
  } catch {
    return say("The server doesn't answer; the page shows what it had.");
  } finally {
    polling = false;
  }
}

function start() {
  recall();
  applyTheme();
  if (matchMedia("(max-width: 960px)").matches) find("panel").open = false;
  find("theme").addEventListener("click", () => {
    toggleTheme();
    applyTheme();
    showAnalyses();
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    applyTheme();
    showAnalyses();
    show();
  });
  find("search").addEventListener("input", (event) => {
    state.search = event.target.value;
    show();
  });
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    Object.assign(state, { filters: {}, search: "", hidden: new Set() });
    showFilters();
    show();
  });
  find("comparison").addEventListener("change", (event) => {
    state.comparison = event.target.value;
    show();
  });
  find("measure").value = state.measure;
  find("measure").addEventListener("change", (event) => {
    state.measure = event.target.value;
    show();
  });
  find("cell").addEventListener("change", (event) => {
    state.cell = event.target.value;
    showSamples();
    remember();
  });
  find("find").addEventListener("input", listSamples);
  find("more").addEventListener("click", fetchMore);
  addEventListener("beforeprint", drawAll);
  showAll();
  if (LIVE) setInterval(poll, POLL_MS);
}

start();
