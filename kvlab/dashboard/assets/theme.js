// Light or dark: as the system says, until the button says otherwise; and a colour for each policy, the same everywhere.

const COLOURS = ["#3b78d8", "#d9660d", "#1f9254", "#8b5cf6", "#d6405a", "#0c8f9c", "#a0693b", "#cf4f97", "#7f8a12", "#6b7a90"];
const SYMBOLS = ["circle", "square", "triangle-up", "x", "pentagon", "star"];

function applyTheme() {
  const own = state.theme ?? stored();
  const dark = own ? own === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  find("theme").textContent = dark ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", dark ? "Use the light theme" : "Use the dark theme");
}

function toggleTheme() {
  state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("kvlab-theme", state.theme);
  } catch {
    /* files may have no storage */
  }
}

function stored() {
  try {
    return localStorage.getItem("kvlab-theme");
  } catch {
    return null;
  }
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function policies() {
  return distinct(state.data.cells.filter((cell) => !cell.full).map((cell) => cell.label)).sort();
}

function look(cell) {
  if (cell.full) return { colour: colour("full"), symbol: "diamond" };
  const place = policies().indexOf(cell.label);
  return { colour: COLOURS[place % COLOURS.length], symbol: SYMBOLS[Math.floor(place / COLOURS.length) % SYMBOLS.length] };
}
