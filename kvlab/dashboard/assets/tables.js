// The chosen comparison as `kvlab table` prints it, and all differences to the full cache at once.

function showComparison() {
  const there = shownComparisons();
  if (!there.some((one) => one.id === state.comparison)) state.comparison = there[0]?.id ?? "";
  find("comparison").replaceChildren(...there.map((one) => option(one.id, one.title, one.id === state.comparison)));
  const comparison = there.find((one) => one.id === state.comparison);
  const cells = comparison ? cellsOf(comparison.id) : [];
  find("comparison-about").textContent = comparison ? comparison.sheet.about : "No cell is left by these filters.";
  draw(find("quality"), comparison ? qualityFigure(comparison, cells) : { traces: [], empty: "No cell is left." });
  draw(find("speed"), comparison ? speedFigure(cells) : { traces: [], empty: "No cell is left." });
  showTable(comparison);
}

function showTable(comparison) {
  const sheet = comparison?.sheet ?? { header: [], right: [], rows: [], notes: [] };
  const every = state.data.cells.filter((cell) => cell.comparison === comparison?.id);
  const kind = (place) => (sheet.right[place] ? "number" : sheet.header[place] === "note" ? "note" : "");
  const head = make(
    "thead",
    {},
    make(
      "tr",
      {},
      sheet.header.map((text, place) => make("th", { scope: "col", class: kind(place) }, text)),
    ),
  );
  const rows = sheet.rows
    .filter((_, place) => isShown(every[place]))
    .map((row) =>
      make(
        "tr",
        {},
        row.map((text, place) => (place ? make("td", { class: kind(place) }, text) : make("th", { scope: "row" }, text))),
      ),
    );
  find("table").replaceChildren(...(comparison ? [head, make("tbody", {}, rows)] : []));
  find("notes").replaceChildren(
    ...sheet.notes.map((note) => make("li", { class: note.startsWith("Warning: ") ? "warning" : "" }, note)),
  );
}

// ------------------------------------------------------------------------------------------------ differences

function showDifferences() {
  const columns = shownComparisons().filter((one) => one.base);
  const cells = shownCells().filter((cell) => !cell.full || cell.delta);
  const rowOf = (cell) => JSON.stringify([cell.label, cell.budget_label ?? ""]);
  const rows = distinct(cells.filter((cell) => columns.some((one) => one.id === cell.comparison)).map(rowOf));
  const order = policies();
  const sizes = new Map(cells.map((cell) => [rowOf(cell), cell.ratio ?? cell.tokens ?? cell.bytes ?? Infinity]));
  rows.sort((a, b) => order.indexOf(JSON.parse(a)[0]) - order.indexOf(JSON.parse(b)[0]) || sizes.get(b) - sizes.get(a));
  const scales = new Map(
    columns.map((one) => [
      one.id,
      Math.max(
        0,
        ...cells.filter((c) => c.comparison === one.id && c.delta && !c.delta.noise).map((c) => Math.abs(c.delta.value)),
      ),
    ]),
  );
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, "policy and budget"),
    columns.map((one) => columnHead(one)),
  );
  const places = new Map(cells.map((cell) => [`${cell.comparison}${rowOf(cell)}`, cell]));
  const body = rows.map((row) => {
    const [label, budget] = JSON.parse(row);
    const found = columns.map((one) => places.get(`${one.id}${row}`));
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, label, make("small", { class: "dim" }, ` ${budget}`)),
      columns.map((one, place) => differenceCell(one, found[place], scales.get(one.id))),
    );
  });
  find("differences").replaceChildren(
    ...(rows.length
      ? [make("thead", {}, head), make("tbody", {}, body)]
      : [make("tbody", {}, make("tr", {}, make("td", {}, "No full cache to compare with, or no other cell.")))]),
  );
}

function columnHead(comparison) {
  return make(
    "th",
    { scope: "col", title: comparison.title },
    shortTitle(comparison),
    make("small", {}, metricText(comparison)),
  );
}

function differenceCell(comparison, cell, scale) {
  if (!cell?.delta) return make("td", { class: "noise" }, cell?.status === "failed" ? "failed" : "–");
  const [value, rest] = cell.delta.text.split(" [");
  const good = cell.delta.value > 0 === (comparison.better !== "lower");
  const p = known(cell.mcnemar_p) ? `McNemar p ${cell.mcnemar_p < 0.001 ? "<0.001" : cell.mcnemar_p.toFixed(3)}` : null;
  const td = make(
    "td",
    { class: cell.delta.noise ? "noise" : "clear", title: hover(comparison, cell) },
    cell.delta.noise ? null : mark(good),
    value,
    rest ? make("small", {}, `[${rest}`) : null,
    p ? make("small", {}, p) : null,
  );
  if (!cell.delta.noise && scale > 0) {
    td.style.background = `rgba(var(--${good ? "better" : "worse"}), ${(0.12 + (0.38 * Math.abs(cell.delta.value)) / scale).toFixed(3)})`;
  }
  return td;
}

// Not by colour alone: what an interval without 0 says.
function mark(good) {
  return [
    make("span", { "aria-hidden": "true" }, good ? "▲ " : "▼ "),
    make("span", { class: "hidden" }, good ? "better " : "worse "),
  ];
}

function hover(comparison, cell) {
  const { low, high, n, noise } = cell.delta;
  const range = known(low) ? `95 % interval [${number(low)}, ${number(high)}]` : "no interval";
  const lines = [
    `${cell.label}, ${cell.budget_label ?? ""}: ${comparison.metric} ${number(cell.value)}, ${number(cell.delta.value)} to full`,
    `${range}, n = ${n}${noise ? ", within noise" : ""}`,
  ];
  if (cell.gold) lines.push(`log-probability of the gold answer ${cell.gold.text}`);
  return lines.join("\n");
}
