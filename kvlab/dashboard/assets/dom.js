"use strict";
// Elements and texts. Whatever comes from models or data goes in as text, never as markup.

const find = (id) => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const { class: classes, ...others } = properties;
  const element = document.createElement(name);
  if (classes) element.className = classes;
  for (const [key, value] of Object.entries(others)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(
    ...children
      .flat()
      .filter((child) => child !== null && child !== undefined)
      .map((child) => (child instanceof Node ? child : String(child))),
  );
  return element;
}

// plotly reads a little markup in its texts.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const known = (value) => value !== null && value !== undefined;

function number(value, digits = 3) {
  return known(value) ? Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits }) : "–";
}

const megabytes = (bytes) => (known(bytes) ? `${number(bytes / 1e6)} MB` : "–");

const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const distinct = (values) => [...new Set(values)];

function option(value, text, chosen) {
  const element = make("option", { value }, text);
  element.selected = chosen;
  return element;
}
