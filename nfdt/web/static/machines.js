// The machines of a server: what runs there, and what they use.

import { $, bytes, element, fill, get, isNumber, tell } from "./format.js";

const EVERY_MS = 2000;
const rows = {}; // by machine

export function showMachines() {
  $("machines").hidden = false;
  $("title").textContent = "machines";
  document.title = "machines · NFDT";
  const again = () => get("/api/machines").then(draw).then(() => tell(), tell).then(() => setTimeout(again, EVERY_MS));
  again();
}

function draw(machines) {
  const body = $("machines").querySelector("tbody"), onGpus = machines.some(machine => machine.gpus);
  $("no-machine").hidden = machines.length > 0;
  for (const head of $("machines").querySelectorAll("th.gpu")) head.hidden = !onGpus;
  body.replaceChildren(...machines.map(machine => {
    const links = machine.jobs.flatMap(job => [" ", job.startsWith("(") ? job : element("a", { href: `/jobs/${job}` }, job)]);
    const gpus = [machine.gpus || "-", isNumber(machine.gpu_use) ? `${Math.round(100 * machine.gpu_use)} %` : "-",
      machine.gpus ? `${bytes(machine.gpu_used_bytes)} of ${bytes(machine.gpu_total_bytes)}` : "-"];
    const slots = [machine.workers, machine.shards, machine.free, machine.away];
    const cpu = machine.cores ? [`${machine.busy_cores.toFixed(1)} of ${machine.cores}`] : ["-"];
    const memory = machine.total_bytes ? `${bytes(machine.used_bytes)} of ${bytes(machine.total_bytes)}` : "-";
    const tr = rows[machine.host] ??= element("tr");
    return fill(tr, [machine.host, machine.devices.join(", ") || "-", element("span", {}, ...links), ...slots, ...cpu, memory, ...(onGpus ? gpus : [])], 3);
  }));
}
