// What `kvlab analyze` found of a model's attention. The numbers are its own.

const SETS = ["#4477aa", "#66a9c9", "#228833", "#b7a52e", "#8a94a3"];

function column(rows, name) {
  return rows.map((row) => row[name]);
}

function lines(rows, names) {
  return names
    .filter((name) => known(rows[0]?.[name]))
    .map((name, place) => ({
      type: "scatter",
      mode: "lines+markers",
      name: plain(name),
      x: column(rows, "layer"),
      y: column(rows, name),
      line: { color: COLOURS[place], width: 1.5 },
      marker: { size: 5, color: COLOURS[place] },
    }));
}

const LEGEND = { showlegend: true, legend: { orientation: "h", y: -0.3, yanchor: "top", font: { size: 11 } } };
const DRAWINGS = {
  sparsity: (rows) => ({
    traces: [
      {
        type: "heatmap",
        x: column(rows, "layer"),
        y: column(rows, "head"),
        z: column(rows, "sparsity"),
        colorscale: "Viridis",
        zmin: 0,
        zmax: 1,
        hovertemplate: "layer %{x}, head %{y}: %{z:.3f}<extra></extra>",
        colorbar: { thickness: 10, len: 0.9 },
      },
    ],
    x: { title: "layer" },
    y: { title: "query head" },
  }),
  heavy_hitters: (rows) => ({
    traces: lines(rows, ["top5", "top10", "top20", "overlap"]),
    layout: LEGEND,
    x: { title: "layer" },
    y: { title: "share", range: [0, 1.03] },
  }),
  persistence: (rows) => ({
    traces: lines(rows, ["persistence", "s1", "s2"]),
    layout: LEGEND,
    x: { title: "layer" },
    y: { title: "share", range: [0, 1.03] },
  }),
  heads: (rows) => ({
    traces: distinct(column(rows, "member")).map((member, place) => ({
      type: "histogram",
      name: plain(member),
      x: rows.filter((row) => row.member === member).map((row) => row.layer),
      xbins: { start: -0.5, end: Math.max(...column(rows, "layer")) + 0.5, size: 1 },
      marker: { color: SETS[place % SETS.length] },
      hovertemplate: "layer %{x}: %{y} heads<extra>%{fullData.name}</extra>",
    })),
    layout: { ...LEGEND, barmode: "stack", bargap: 0.1 },
    x: { title: "layer" },
    y: { title: "KV heads, of all texts" },
  }),
  hash: (rows) => ({
    traces: [
      {
        type: "box",
        x: column(rows, "bits"),
        y: column(rows, "r"),
        marker: { color: COLOURS[0], size: 4 },
        line: { width: 1.2 },
        boxpoints: "all",
        jitter: 0.4,
        pointpos: 0,
        hovertemplate: "%{x} bits: r = %{y:.3f}<extra></extra>",
      },
    ],
    x: { title: "bits of a code", type: "category" },
    y: { title: "r of attention and shared bits" },
  }),
};

function showAnalyses() {
  const found = state.data.analyses;
  find("analyses").replaceChildren(
    ...(found.length
      ? [make("div", { class: "panels" }, found.map(analysisFigure))]
      : [
          make(
            "p",
            { class: "dim" },
            "No analyses lie in these folders: ",
            make("code", {}, "kvlab analyze"),
            " writes them to outputs/analyze.",
          ),
        ]),
  );
}

function analysisFigure(one) {
  const place = make("div", { class: "plot" });
  const figure = one.rows.length ? DRAWINGS[one.name](one.rows) : { traces: [] };
  draw(place, { ...figure, empty: "It has no rows.", label: `Chart: ${one.title}. ${one.meaning}` });
  return make(
    "figure",
    {},
    make("figcaption", {}, make("h3", {}, one.title), make("p", { class: "dim" }, one.about)),
    place,
    make("p", { class: "dim" }, one.meaning),
  );
}
