// plotly's figures. One is drawn when it comes into view, and again when what it shows changes.

const wanted = new Map();
const drawn = new WeakMap();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) drawNow(entry.target);
  },
  { rootMargin: "300px" },
);

function draw(place, figure) {
  wanted.set(place, figure);
  watcher.unobserve(place);
  watcher.observe(place);
}

function drawNow(place) {
  const figure = wanted.get(place);
  if (!figure || !place.isConnected) return wanted.delete(place);
  wanted.delete(place);
  if (!figure.traces.length) return sayEmpty(place, figure.empty);
  if (!drawn.get(place)) place.textContent = "";
  place.classList.remove("empty");
  drawn.set(place, true);
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", figure.label);
  const settings = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  return Plotly.react(place, figure.traces, layout(figure), settings);
}

function drawAll() {
  for (const place of [...wanted.keys()]) drawNow(place);
}

function sayEmpty(place, text) {
  if (drawn.get(place)) Plotly.purge(place);
  drawn.delete(place);
  place.removeAttribute("role");
  place.removeAttribute("aria-label");
  place.textContent = text;
  place.classList.add("empty");
}

function layout(figure) {
  const axis = (own) => ({
    gridcolor: colour("grid"),
    zeroline: false,
    linecolor: colour("line"),
    tickcolor: colour("line"),
    automargin: true,
    ...own,
    title: { text: plain(own?.title ?? ""), font: { size: 12 }, standoff: 8 },
  });
  return {
    margin: { l: 54, r: 12, t: 12, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
    hoverlabel: {
      bgcolor: colour("card"),
      bordercolor: colour("line"),
      font: { color: colour("text"), size: 12 },
      align: "left",
    },
    hovermode: "closest",
    showlegend: false,
    dragmode: "zoom",
    ...figure.layout,
    xaxis: axis(figure.x),
    yaxis: axis(figure.y),
  };
}

// ------------------------------------------------------------------------------------------------ cells as points

function describe(cell, more) {
  const lines = [`${cell.label}${cell.budget_label ? `, ${cell.budget_label}` : ""}`, ...more];
  if (cell.delta) lines.push(`Δ to full ${cell.delta.text}`);
  return lines.map(plain).join("<br>");
}

function interval(cell) {
  return known(cell.low) && known(cell.high) ? ` [${number(cell.low)}, ${number(cell.high)}]` : "";
}

// What figures show of a cell: its value, or its difference to the full cache, each with its interval.
function measured(cell) {
  if (state.measure === "value") return cell;
  return cell.delta ?? (cell.full ? { value: 0, low: 0, high: 0 } : { value: null, low: null, high: null });
}

// Cells in one place are set side by side, or their intervals would cover each other.
function sideBySide(cells, x) {
  const there = cells.map(x).filter(known),
    range = Math.max(...there) - Math.min(0, ...there) || 1,
    labels = policies();
  const shift = new Map();
  for (const cell of cells) {
    const near = distinct(
      cells.filter((one) => known(x(one)) && Math.abs(x(one) - x(cell)) < 0.004 * range).map((one) => one.label),
    );
    near.sort((a, b) => labels.indexOf(a) - labels.indexOf(b));
    shift.set(cell, Math.min(0.013, 0.08 / near.length) * range * (near.indexOf(cell.label) - (near.length - 1) / 2));
  }
  return (cell) => (known(x(cell)) ? x(cell) + shift.get(cell) : null);
}

// Budgets of one unit are steps of one setting, which a line may join.
function unitOf(cell) {
  return cell.budget_label?.endsWith(" of total") ? "total" : Object.keys(UNITS).find((unit) => known(cell[unit]));
}

function points(cells, x, y, more, extra) {
  const groups = new Map();
  for (const cell of cells) {
    const line = JSON.stringify([cell.label, unitOf(cell)]);
    if (known(x(cell)) && known(y(cell))) groups.set(line, [...(groups.get(line) ?? []), cell]);
  }
  return [...groups.values()].map((group) => {
    group.sort((a, b) => x(a) - x(b));
    const { colour: shade, symbol } = look(group[0]);
    return {
      type: "scatter",
      mode: "lines+markers",
      name: plain(group[0].label),
      x: group.map(x),
      y: group.map(y),
      line: { color: shade, width: 1.5 },
      opacity: 0.95,
      marker: { color: shade, symbol, size: group[0].full ? 11 : 9, line: { width: 1, color: colour("card") } },
      text: group.map((cell) => describe(cell, more(cell))),
      hovertemplate: "%{text}<extra></extra>",
      ...extra(group, shade),
    };
  });
}

function bars(group, shade) {
  return {
    error_y: {
      type: "data",
      symmetric: false,
      thickness: 1.2,
      width: 3,
      color: shade,
      array: group.map(measured).map((cell) => (known(cell.high) ? cell.high - cell.value : 0)),
      arrayminus: group.map(measured).map((cell) => (known(cell.low) ? cell.value - cell.low : 0)),
    },
  };
}

// Few bytes and a good value: what no other cell beats in both.
function front(cells, better) {
  const gain = (cell) => (better === "lower" ? -1 : 1) * measured(cell).value;
  const sorted = cells.filter((cell) => known(cell.kv_bytes) && known(measured(cell).value));
  sorted.sort((a, b) => a.kv_bytes - b.kv_bytes || gain(b) - gain(a));
  let best = -Infinity;
  return sorted.filter((cell) => gain(cell) > best && ((best = gain(cell)), true));
}

const wide = (values, times) =>
  values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > times * Math.min(...values);

function valueAxis(comparison, cells) {
  const values = cells.map((cell) => measured(cell).value).filter(known),
    highest = cells.map((cell) => measured(cell).high).filter(known),
    nothing = state.measure === "value" && [...values, ...highest].every((value) => value === 0);
  return {
    title: `${state.measure === "delta" ? "Δ " : ""}${metricText(comparison)}`,
    ...(comparison.better === "lower" && wide(values, 20) ? { type: "log" } : {}),
    ...(nothing ? { range: [-0.04, 1] } : {}), // else it reaches down to -1
  };
}

function metricText(comparison) {
  return comparison.metric ? `${comparison.metric}${comparison.better ? `, ${comparison.better} is better` : ""}` : "";
}

function qualityFigure(comparison, cells) {
  const bytes = (cell) => (known(cell.kv_bytes) ? cell.kv_bytes / 1e6 : null);
  const beside = sideBySide(cells, bytes);
  const best = front(cells, comparison.better);
  const edge = {
    type: "scatter",
    mode: "lines",
    name: "Pareto front",
    x: best.map(beside),
    y: best.map((cell) => measured(cell).value),
    hoverinfo: "skip",
    line: { color: colour("dim"), width: 1.5, dash: "dot", shape: "hv" },
  };
  const traces = points(
    cells,
    beside,
    (cell) => measured(cell).value,
    (cell) => [
      `${comparison.metric} ${number(cell.value)}${interval(cell)}, n = ${cell.n}`,
      `${megabytes(cell.kv_bytes)}${cell.kv_bytes_full ? `, ${number(cell.kv_bytes / cell.kv_bytes_full, 2)} × full` : ""}`,
    ],
    bars,
  );
  return {
    traces: traces.length ? [edge, ...traces] : [],
    empty: "No cell here has a value and bytes.",
    label: `Chart: ${metricText(comparison)}, against megabytes of keys and values held, for ${counted(cells.length, "cell")}. The table below has the numbers.`,
    x: { title: "KV bytes held a sequence, MB", rangemode: "tozero" },
    y: valueAxis(comparison, cells),
  };
}

function speedFigure(cells) {
  const traces = points(
    cells,
    sideBySide(cells, (cell) => (known(cell.kv_bytes) ? cell.kv_bytes / 1e6 : null)),
    (cell) => cell.decode_tokens_per_s,
    (cell) => [`${number(cell.decode_tokens_per_s)} tokens/s at a batch of ${cell.batch_size}`, megabytes(cell.kv_bytes)],
    () => ({}),
  );
  return {
    traces,
    empty: "No cell here has a decoding speed.",
    label: `Chart: decoded tokens a second against megabytes of keys and values held, for ${counted(cells.length, "cell")}.`,
    x: { title: "KV bytes held a sequence, MB", rangemode: "tozero" },
    y: { title: "decoded tokens/s", rangemode: "tozero" },
  };
}

const UNITS = { ratio: "budget, % of the prompt", tokens: "budget, tokens a head", bytes: "budget, MB a sequence" };
const SCALES = { ratio: 100, tokens: 1, bytes: 1e-6 };

function budgetFigure(comparison, cells, unit) {
  const size = (cell) => (known(cell[unit]) ? cell[unit] * SCALES[unit] : null);
  const sizes = distinct(cells.map(size).filter(known)).sort((a, b) => a - b);
  const full = cells.filter((cell) => cell.path === comparison.base).map(measured)[0];
  const traces = points(
    cells.filter((cell) => known(cell[unit])),
    sideBySide(cells, size),
    (cell) => measured(cell).value,
    (cell) => [`${comparison.metric} ${number(cell.value)}${interval(cell)}, n = ${cell.n}`],
    bars,
  );
  const flat = (value) => ({
    type: "rect",
    xref: "paper",
    x0: 0,
    x1: 1,
    layer: "below",
    line: { width: 0 },
    fillcolor: colour("full"),
    opacity: 0.09,
    ...value,
  });
  const shapes =
    full && known(full.value)
      ? [
          {
            type: "line",
            xref: "paper",
            x0: 0,
            x1: 1,
            y0: full.value,
            y1: full.value,
            layer: "below",
            line: { color: colour("full"), width: 1.5, dash: "dash" },
          },
          ...(known(full.low) ? [flat({ y0: full.low, y1: full.high })] : []),
        ]
      : [];
  return {
    traces,
    empty: "No cell here has a budget.",
    layout: { shapes },
    label: `Chart: ${metricText(comparison)}, against ${UNITS[unit]}, for ${counted(traces.length, "policy").replace("policys", "policies")}.`,
    x: { title: UNITS[unit], ...(sizes.length <= 8 ? { tickvals: sizes, ticktext: sizes.map((one) => number(one)) } : {}) },
    y: valueAxis(comparison, cells),
  };
}

// One panel for each comparison and unit of budget that cells have. Panels stay, so that plotly need not begin anew.
function showBudgets() {
  const place = find("budgets");
  const panels = shownComparisons().flatMap((comparison) =>
    Object.keys(UNITS)
      .map((unit) => ({ comparison, unit, key: `${comparison.id}/${unit}`, cells: cellsOf(comparison.id) }))
      .filter((panel) => panel.cells.some((cell) => known(cell[panel.unit]) && known(cell.value))),
  );
  const there = new Map([...place.children].map((figure) => [figure.dataset.key, figure]));
  place.replaceChildren(
    ...panels.map((panel) => {
      const figure =
        there.get(panel.key) ??
        make("figure", { "data-key": panel.key }, make("figcaption", {}, make("h3")), make("div", { class: "plot" }));
      figure.querySelector("h3").textContent = shortTitle(panel.comparison);
      draw(figure.querySelector(".plot"), budgetFigure(panel.comparison, panel.cells, panel.unit));
      return figure;
    }),
  );
  if (!panels.length) place.append(make("p", { class: "dim" }, "No cell here has a budget."));
}
