// What the page does beyond being read: values at the pointer, and every chart as SVG, PNG and CSV.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
// Styles that a picture needs outside of this page.
const STYLES = ["fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "font-family", "font-size", "font-weight", "text-anchor"];
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`)?.id.slice(name.length + 1);
const slug = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
const readable = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "\u2212");

function make(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// The mean of the last `width` known values up to each, as the drawn lines have it.
function smoothed(values, width) {
  return values.map((value, end) => {
    const known = values.slice(Math.max(0, end + 1 - width), end + 1).filter((each) => each !== null);
    return value === null ? null : known.reduce((sum, each) => sum + each, 0) / known.length;
  });
}

function read(figure, data, event) {
  const drawing = figure.querySelector("svg");
  drawing.querySelector(".reading")?.remove();
  const axis = Object.keys(data.axes).length > 1 ? chosen("x") : Object.keys(data.axes)[0];
  const [left, right, top, bottom, low, high] = data.axes[axis];
  const box = drawing.getBoundingClientRect();
  const across = (event.clientX - box.left) / box.width * drawing.viewBox.baseVal.width;
  if (event.type === "pointerleave" || across < left - 5 || across > right + 5) return;
  const place = low + (across - left) / (right - left) * (high - low);
  const width = figure.querySelector(".smoothed") ? Number(chosen("smoothing")) : 1;
  let nearest = null;
  const found = [];
  for (const series of data.series) {
    const places = series.places[axis];
    let index = -1;
    for (let each = 0; each < places.length; each++)
      if (places[each] !== null && (index < 0 || Math.abs(places[each] - place) < Math.abs(places[index] - place))) index = each;
    if (index < 0 || series.values[index] === null) continue;
    // Beyond its end a line has no value.
    const step = Math.abs(places[index] - (places[index - 1] ?? places[index + 1] ?? places[index]));
    if (Math.abs(places[index] - place) > step + 1e-9 * Math.abs(place) && places.length > 1) continue;
    if (nearest === null || Math.abs(places[index] - place) < Math.abs(nearest - place)) nearest = places[index];
    found.push([series, smoothed(series.values, width)[index]]);
  }
  if (!found.length) return;
  const shown = [["", `${readable(nearest)} ${{ steps: "environment steps", return: "or more" }[axis] ?? axis}`],
    ...found.map(([series, value]) => [series.css, `${series.name}: ${readable(value)}`])];
  const x = left + (nearest - low) / (high - low) * (right - left);
  const turned = x > (left + right) / 2;
  drawing.append(make("g", { class: "reading" }, make("path", { d: `M${x} ${top}V${bottom}` }),
    ...shown.map(([css, text], row) => make("text",
      { x: x + (turned ? -8 : 8), y: top + 12 + 15 * row, "text-anchor": turned ? "end" : "start" },
      ...(css ? [make("tspan", { class: css }, "\u25a0 ")] : []), make("tspan", {}, text)))));
}

// A copy of a drawing with its styles written out, and without what is hidden.
function copied(drawing) {
  const copy = drawing.cloneNode(true);
  const originals = [drawing, ...drawing.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, index) => {
    const style = getComputedStyle(original);
    if (style.display === "none" || original.matches(".reading")) copies[index].dataset.hidden = "";
    for (const name of STYLES) copies[index].setAttribute(name, style.getPropertyValue(name));
    copies[index].removeAttribute("class");
  });
  copy.querySelectorAll("[data-hidden]").forEach((each) => each.remove());
  return copy;
}

// One picture of all drawings of a card, with its title and its legend.
function picture(figure) {
  const drawings = [...figure.querySelectorAll("svg")];
  const columns = Math.min(drawings.length, 4);
  const { width, height } = drawings[0].viewBox.baseVal;
  const card = getComputedStyle(figure), ink = { "font-family": card.fontFamily, fill: card.color };
  const total = Math.max(columns * width, 480);
  const parts = [make("text", { ...ink, x: 10, y: 24, "font-size": 15, "font-weight": 650 }, figure.querySelector("h3").textContent)];
  let x = 10, y = 46;
  for (const entry of figure.querySelectorAll(".legend li")) {
    const wide = 30 + 7 * entry.textContent.length;
    if (x > 10 && x + wide > total) [x, y] = [10, y + 18];
    parts.push(make("rect", { x, y: y - 6, width: 16, height: 4, fill: getComputedStyle(entry.querySelector("i")).color }),
      make("text", { ...ink, x: x + 22, y, "font-size": 12 }, entry.textContent));
    x += wide;
  }
  const head = y + 10;
  drawings.forEach((drawing, index) => {
    const copy = copied(drawing);
    const place = { x: index % columns * width, y: head + Math.floor(index / columns) * height, width, height };
    for (const [key, value] of Object.entries(place)) copy.setAttribute(key, value);
    parts.push(copy);
  });
  const tall = head + Math.ceil(drawings.length / columns) * height + 6;
  const paper = make("rect", { width: total, height: tall, fill: card.backgroundColor });
  const whole = make("svg", { xmlns: SVG, width: total, height: tall, viewBox: `0 0 ${total} ${tall}` }, paper, ...parts);
  return { text: new XMLSerializer().serializeToString(whole), width: total, height: tall };
}

async function png({ text, width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [3 * width, 3 * height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function csv(data) {
  const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : cell);
  const names = Object.keys(data.series[0].places);
  const bounds = data.series.some((series) => series.low) ? ["low", "high"] : [];
  const rows = data.series.flatMap((series) => series.values.map((value, index) =>
    [series.name, ...names.map((name) => series.places[name][index]), value, ...bounds.map((name) => series[name]?.[index])]));
  return [["series", ...names, data.label, ...bounds], ...rows]
    .map((row) => row.map((cell) => quoted(cell ?? "")).join(",") + "\n").join("");
}

function save(figure, kind, content) {
  const link = document.createElement("a");
  link.download = `${slug(document.title)}-${slug(figure.querySelector("h3").textContent)}.${kind}`;
  link.href = URL.createObjectURL(content);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const figure of document.querySelectorAll("figure")) {
  const numbers = figure.querySelector("script");
  if (!numbers || !figure.querySelector("svg")) continue;
  const data = JSON.parse(numbers.textContent);
  const kinds = {
    SVG: () => new Blob([picture(figure).text], { type: "image/svg+xml" }),
    PNG: () => png(picture(figure)),
    CSV: () => new Blob([csv(data)], { type: "text/csv" }),
  };
  const bar = document.createElement("span");
  bar.className = "saving";
  for (const [name, content] of Object.entries(kinds)) {
    const button = document.createElement("button");
    button.textContent = name;
    button.ariaLabel = `save ${figure.querySelector("h3").textContent} as ${name}`;
    button.addEventListener("click", async () => save(figure, name.toLowerCase(), await content()));
    bar.append(button);
  }
  figure.querySelector("figcaption").append(bar);
  if (Object.keys(data.axes).length)
    for (const type of ["pointermove", "pointerleave"])
      figure.querySelector("svg").addEventListener(type, (event) => read(figure, data, event));
}
