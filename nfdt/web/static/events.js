// Events of a job as texts, and those that a user should know of.

import { clock, element, short } from "./format.js";

const WARNINGS = ["worker_lost", "shard_lost", "stalled", "slow_links"];

export const levelOf = ({ kind, data }) => kind === "log" ? data.level : WARNINGS.includes(kind) ? "warning" : data.state === "failed" ? "error" : "info";
export const isAlert = event => ["warning", "error"].includes(levelOf(event));

export function textOf({ kind, data }) {
  return kind === "log" ? `${data.worker || "server"}: ${data.text}`
    : kind === "epoch_end" ? `epoch ${data.epoch + 1} ends ${Object.entries(data.logs).map(([k, v]) => `${k}=${short(v)}`).join(" ")}`
      : kind === "epoch_begin" ? `epoch ${data.epoch + 1} begins`
        : kind.endsWith("_lost") ? `${data.worker ?? data.shard}: ${data.reason}`
          : kind === "stalled" ? `${data.waiting_for.join(", ")} for ${short(data.since_s)} s`
            : Object.entries(data).filter(([, v]) => v !== null && typeof v !== "object").map(([k, v]) => `${k}=${v}`).join(" ");
}

// Show alerts, the latest first, each with more cells in front; without any, the section is hidden.
export function drawAlerts(section, alerts, front = () => []) {
  section.hidden = !alerts.length;
  section.querySelector("ul").replaceChildren(...alerts.toReversed().map(event => element("li", { class: levelOf(event) },
    ...front(event), `${clock(event.at)} ${event.kind === "log" ? "" : `${event.kind.replace("_", " ")}: `}${textOf(event)}`)));
}
