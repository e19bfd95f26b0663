// Which samples came out otherwise than with the full cache: what was asked, what is right, and both outputs.

const fetched = new Map(); // of a served page: whole texts, and samples that the page lacks
const underway = new Set();
let chosenSample = "";

function browsable() {
  return cellsOf(state.comparison).filter((cell) => cell.changed);
}

function showSamples() {
  const cells = browsable();
  if (!cells.some((cell) => cell.path === state.cell))
    state.cell = (cells.find((cell) => cell.changed.count) ?? cells[0])?.path ?? "";
  find("cell").replaceChildren(
    ...cells.map((cell) =>
      option(cell.path, [cell.label, cell.budget_label].filter(Boolean).join(", "), cell.path === state.cell),
    ),
  );
  listSamples();
  fetchWhole();
}

function currentCell() {
  const cell = browsable().find((one) => one.path === state.cell);
  if (!cell) return null;
  const more = fetched.get(cell.path);
  return {
    cell,
    comparison: comparisonOf(cell),
    shown: more?.shown ?? cell.changed.shown,
    questions: { ...state.data.questions[cell.changed.prompts], ...more?.questions },
    answers: { ...state.data.answers[cell.comparison], ...more?.answers },
  };
}

function listSamples() {
  const now = currentCell();
  find("samples-about").textContent = now ? aboutSamples(now) : "No cell to compare: choose another comparison.";
  const word = find("find").value.trim().toLowerCase();
  const text = (one) => JSON.stringify([one, now.questions[one.id], now.answers[one.id]]).toLowerCase();
  const shown = now ? now.shown.filter((one) => !word || text(one).includes(word)) : [];
  if (!shown.some((one) => one.id === chosenSample)) chosenSample = shown[0]?.id ?? "";
  find("sample-list").replaceChildren(
    ...shown.map((one) =>
      make(
        "li",
        {},
        make(
          "button",
          {
            type: "button",
            "aria-current": String(one.id === chosenSample),
            onclick: () => {
              chosenSample = one.id;
              listSamples();
              focusChosen();
            },
          },
          make("span", {}, one.id),
          make("span", {}, valueChange(now, one)),
        ),
      ),
    ),
  );
  find("more").hidden = !(LIVE && now && now.shown.length < now.cell.changed.count);
  showSample(
    now,
    shown.find((one) => one.id === chosenSample),
  );
}

function focusChosen() {
  find("sample-list").querySelector('[aria-current="true"]')?.focus();
}

function aboutSamples({ cell, comparison, shown }) {
  const { count, of } = cell.changed;
  if (!comparison.base) return `${counted(of, "sample")}; there is no full cache to compare with.`;
  if (!count) return `None of ${counted(of, "sample")} came out otherwise than with the full cache.`;
  const scored = cell.changed.shown.length && !("output" in cell.changed.shown[0]) && !("choice" in cell.changed.shown[0]);
  const what = `${count} of ${counted(of, "sample")} ${scored ? "scored" : "answered"} otherwise than with the full cache, those that lost most first.`;
  const rest = LIVE ? "" : " `kvlab dashboard --serve` has the others.";
  return shown.length < count ? `${what} ${shown.length} are here.${rest}` : what;
}

function valueChange(now, one) {
  const base = now.answers[one.id]?.value;
  return known(one.value) ? (known(base) ? `${number(base, 4)} → ${number(one.value, 4)}` : number(one.value)) : "";
}

function showSample(now, one) {
  if (!one) return find("sample").replaceChildren(make("p", { class: "dim" }, now ? "No sample to show." : ""));
  const asked = now.questions[one.id] ?? {},
    base = now.answers[one.id];
  const facts = [
    ...Object.entries(asked.fields ?? {}).map(
      ([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`,
    ),
    ...(asked.others ? [`${Array.isArray(asked.others) ? asked.others.length : asked.others} further prompts`] : []),
  ];
  const parts = [
    make("h3", {}, one.id),
    facts.length
      ? make(
          "div",
          { class: "facts" },
          facts.map((text) => make("span", { class: "chip" }, text)),
        )
      : null,
    block("Prompt", asked.prompt ? promptParts(asked) : ["This store keeps no texts of prompts: cells that are run now do."]),
    goldBlock(asked),
    make("div", { class: "both" }, [
      base ? answerBlock("Full cache", base, asked, null) : null,
      answerBlock([now.cell.label, now.cell.budget_label].filter(Boolean).join(", "), one, asked, base),
    ]),
  ];
  return find("sample").replaceChildren(...parts.filter(Boolean));
}

function block(title, parts) {
  return make("div", {}, make("h4", {}, title), make("pre", { class: "text", tabindex: "0" }, parts));
}

// The question, where it is the prompt's end, in another colour.
function promptParts({ prompt, question }) {
  if (!question || !prompt.endsWith(question)) return [prompt];
  return [prompt.slice(0, -question.length), make("span", { class: "asks" }, question)];
}

function goldBlock({ answers, choices, right, gold }) {
  if (choices)
    return block(
      "Choices",
      choices.map((text, place) => `${place === right ? "✓" : "\u2002"} ${place}: ${text.trim()}\n`),
    );
  if (answers?.length) return block(answers.length > 1 ? "Right answers" : "Right answer", [answers.join("\n")]);
  return gold ? block("Scored text", [gold]) : null;
}

function answerBlock(title, one, asked, base) {
  const numbers = [
    known(one.value) ? `value ${number(one.value, 4)}` : null,
    known(one.gold_logprob) ? `gold log-probability ${number(one.gold_logprob, 4)}` : null,
  ];
  let parts = [
    "output" in one
      ? one.output || "(nothing)"
      : "choice" in one
        ? `${one.choice}: ${asked.choices?.[one.choice]?.trim() ?? ""}`
        : "(scored, nothing generated)",
  ];
  if (base && typeof base.output === "string" && typeof one.output === "string")
    parts = fromFirstChange(base.output, one.output);
  const box = block(title, parts);
  box.append(make("p", { class: "dim" }, numbers.filter(Boolean).join(", ")));
  return box;
}

// What follows the first character that differs is marked.
function fromFirstChange(before, after) {
  let same = 0;
  while (same < after.length && after[same] === before[same]) same += 1;
  while (same > 0 && /\w/.test(after[same - 1] ?? "") && /\w/.test(after[same] ?? "")) same -= 1;
  if (/[\udc00-\udfff]/.test(after[same] ?? "") && same > 0) same -= 1; // both halves of a character, or neither
  const rest = after.slice(same);
  return [after.slice(0, same), rest ? make("mark", {}, rest) : after ? "" : "(nothing)"];
}

// What the page holds of a cell is cut; the server has it whole.
function fetchWhole() {
  const now = LIVE ? currentCell() : null;
  if (now && now.cell.changed.count && !fetched.has(now.cell.path)) fetchMore();
}

async function fetchMore() {
  const path = currentCell().cell.path,
    data = state.data;
  if (underway.has(path)) return;
  underway.add(path);
  try {
    const before = fetched.get(path) ?? { shown: [], questions: {}, answers: {} };
    const address = `samples.json?cell=${encodeURIComponent(path)}&start=${before.shown.length}`;
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(await answer.text());
    const more = await answer.json();
    if (data === state.data)
      fetched.set(path, {
        shown: [...before.shown, ...more.shown],
        questions: { ...before.questions, ...more.questions },
        answers: { ...before.answers, ...more.answers },
      });
    listSamples();
  } catch (error) {
    say(`Samples can't be fetched: ${error.message}`);
  } finally {
    underway.delete(path);
    if (data !== state.data) fetchWhole(); // the store changed meanwhile
  }
}
