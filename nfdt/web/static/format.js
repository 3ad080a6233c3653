// Texts, requests and elements that all parts of the page use.

export const ENDED = ["succeeded", "failed", "cancelled"]; // states of jobs
export const $ = id => document.getElementById(id);
export const at = seconds => seconds ? new Date(seconds * 1000).toLocaleString() : "-";
export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString();
export const isNumber = value => typeof value === "number";

// A number that is not finite comes as a text.
export function short(value) {
  return isNumber(value) ? Number(value.toPrecision(4)).toString() : typeof value === "string" ? value : JSON.stringify(value);
}

export const logsText = logs => Object.entries(logs).map(([name, value]) => `${name} ${short(value)}`).join("   ");

// The words in a field, and whether a text has one of them; without words every text does.
export const wordsOf = id => $(id).value.toLowerCase().split(/[\s,]+/).filter(Boolean);
export const matches = (text, words) => !words.length || words.some(word => text.toLowerCase().includes(word));

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h} h ${m % 60} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

export function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Set the cells of a row, those from `numbers` on to the right. What has not changed stays, and keeps the focus.
export function fill(tr, cells, numbers = cells.length) {
  cells.forEach((cell, index) => {
    const td = tr.cells[index] ?? tr.insertCell();
    td.className = index >= numbers ? "n" : "";
    if (!(cell instanceof Node)) {
      if (td.textContent !== String(cell)) td.textContent = cell;
    } else if (td.firstChild !== cell) td.replaceChildren(cell);
  });
  return tr;
}

// Return the answer to a request; what went wrong is an error whose message can be shown.
export async function request(path, options) {
  const answer = await fetch(path, options).catch(() => { throw new Error("The server does not answer."); });
  if (!answer.ok) throw new Error(await answer.text() || `The server answers ${answer.status}.`);
  return answer;
}

export const get = async path => (await request(path)).json();

// Show an error as a text of the page; none: all is well again.
export function tell(error) {
  $("error").textContent = error?.message ?? "";
  $("error").hidden = !error;
}
