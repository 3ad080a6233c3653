// The page of a job server: the list of its jobs, one job, or its machines.

import { showJob } from "./job.js";
import { showList } from "./list.js";
import { showMachines } from "./machines.js";

if (location.pathname.startsWith("/jobs/")) showJob(location.pathname.slice("/jobs/".length));
else if (location.pathname === "/machines") showMachines();
else showList();
