// Where each number comes from: versions, commit, device, time, config.

function showProvenance() {
  const cells = shownCells(),
    all = (read) => distinct(cells.map(read).filter(Boolean));
  const mixed = {
    commits: all((cell) => cell.provenance.git_commit),
    devices: all((cell) => cell.provenance.device),
    "torch versions": all((cell) => cell.provenance.versions?.torch),
    "transformers versions": all((cell) => cell.provenance.versions?.transformers),
  };
  const several = Object.entries(mixed)
    .filter(([, values]) => values.length > 1)
    .map(([name, values]) => `${values.length} ${name}: ${values.join(", ")}`);
  find("provenance-about").textContent = cells.length
    ? several.length
      ? `These cells come from ${several.join("; ")}.`
      : `${counted(cells.length, "cell")}, all of one commit, device and set of versions.`
    : "";
  const open = new Set([...document.querySelectorAll("#provenance details[open]")].map((one) => one.dataset.path));
  find("provenance").replaceChildren(
    make(
      "div",
      { class: "provenance" },
      cells.map((cell) => provenanceOf(cell, open.has(cell.path))),
    ),
  );
}

function provenanceOf(cell, open) {
  const title = [
    cell.task,
    cell.label,
    cell.budget_label,
    cell.provenance.started?.replace("T", " ").replace(/\+00:00$/, " UTC"),
  ]
    .filter(Boolean)
    .join(" · ");
  const details = make("details", { "data-path": cell.path, open }, make("summary", {}, title));
  const fill = () => {
    if (details.open && details.children.length === 1) details.append(...provenanceBody(cell));
  };
  details.addEventListener("toggle", fill); // hundreds of configs need not all be there
  fill();
  return details;
}

function provenanceBody(cell) {
  const { versions = {}, ...others } = cell.provenance;
  const rows = [["folder", cell.path], ["run", cell.run_id], ...Object.entries(others), ...Object.entries(versions)].filter(
    ([, value]) => known(value),
  );
  return [
    make(
      "dl",
      {},
      rows.flatMap(([name, value]) => [make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, String(value))]),
    ),
    make("h3", {}, "Config"),
    make("pre", { class: "text", tabindex: "0" }, asYaml(cell.config)),
  ];
}

function asYaml(value, indent = "") {
  return Object.entries(value)
    .map(([key, one]) =>
      one !== null && typeof one === "object" && !Array.isArray(one) && Object.keys(one).length
        ? `${indent}${key}:\n${asYaml(one, `${indent}  `)}`
        : `${indent}${key}: ${typeof one === "string" ? one : JSON.stringify(one)}\n`,
    )
    .join("");
}
